"""The loop: batch, loss, gradients, update; evaluation, log and checkpoint in between.

A step's numbers depend on the step alone (its data by position, its learning rate by number, dropout by the saved
random states), so a run that was killed goes on bit for bit. The host reads losses late, some steps at a time: on a
GPU the next step is launched before the one before it has ended.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sublight.engines.train import checkpoint, huggingface, log
from sublight.engines.train.data import Ahead, Data, Order, evaluation_batches, split_labels
from sublight.engines.train.gpt2 import Block, Gpt2
from sublight.engines.train.run import Run
from sublight.engines.train.update import Update
from sublight.errors import BadInput

READ_EVERY = 8  # steps on a GPU between two waits for their losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a watcher sees after some steps."""

    step: int  # done
    steps: int
    loss: float
    held_out_loss: float | None
    tokens_per_s: float
    memory_bytes: int
    left_s: float


Watch = Callable[[Progress], None]


@dataclass(slots=True)
class _Clock:
    """Seconds of steps alone, evaluations and checkpoints left out."""

    spent_s: float = 0.0
    since_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def restart(self) -> None:
        self.started = time.perf_counter()

    def stop(self) -> None:
        passed = time.perf_counter() - self.started
        self.spent_s, self.since_s = self.spent_s + passed, passed
        self.restart()


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The lowest loss of held-out text so far, and after how many steps."""

    loss: float = math.inf
    step: int = 0


class Trainer:
    """One run in this process: from its newest checkpoint, or from the start."""

    def __init__(self, run: Run, data: Data, device: torch.device, watch: Watch | None = None) -> None:
        settings = run.settings
        settings.check(run.shape)
        data.check(settings.context)
        self.run, self.settings, self.data, self.device, self.watch = run, settings, data, device, watch
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        if settings.deterministic:  # what of PyTorch's has a choice; attention and products are chosen by ourselves
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.model = Gpt2(
            run.shape,
            mode=settings.mode,
            attention=settings.attention,
            device=device.type,
            dropout=settings.dropout,
            compute=getattr(torch, settings.dtype),
            deterministic=settings.deterministic,
            block=self._block(),
        ).initialize(settings.seed)
        if run.weights:
            huggingface.load(self.model, run.folder / run.weights)
        self.model.to(device).train()
        self.update: Any = self._updated()
        self.batches = Ahead(Order(data.train, settings.context, settings.seed), settings.batch, device)
        self.step, self.held_out_loss, self.best = 0, math.nan, Best()
        self.saved_step = -1  # that a checkpoint of this process's own, or the one it goes on from, is of
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.stop_wanted = False
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor, float]] = []
        self._clock, self._begin = _Clock(), time.perf_counter()
        self._restore()
        self.update.prepare()
        self.first_step = self.step
        self.log = self._new_log()
        for row in log.read(self.log.path):
            if row.get("held_out_loss", math.inf) < self.best.loss:
                self.best = Best(loss=row["held_out_loss"], step=row["step"])

    def _block(self) -> type[Block]:
        return Block

    def _updated(self) -> Any:
        """What changes the weights by a batch."""
        return Update(self.model, self.settings, self.device)

    def _new_log(self) -> log.Log:
        return log.Log(self.run.folder / log.NAME, from_step=self.step)

    def _restore(self) -> None:
        state = checkpoint.load(self.run.checkpoints)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.update.optimizer.load_state_dict(state["optimizer"])
        checkpoint.restore_random(state["random"])
        self.step = self.saved_step = state["step"]
        if state["position"] != self.position:
            raise BadInput(
                f"{self.run.folder}: the checkpoint's data position does not fit run.json; do not edit either"
            )

    @property
    def position(self) -> int:
        """Sequences that were read."""
        return self.step * self.settings.batch

    def train(self) -> None:
        """Until the last step, the time limit, or `stop_wanted`; leaves a checkpoint of where it stands."""
        settings = self.settings
        try:
            self._clock.restart()
            while self.step < settings.steps and not self._is_over():
                if self.step % settings.eval_every == 0:
                    self.evaluate()
                self._update()
                if self.step % settings.save_every == 0:
                    self.save()
            self.save()
            self.evaluate()
        finally:
            self.log.close()
            self.batches.close()

    def _is_over(self) -> bool:
        return self.stop_wanted or time.perf_counter() - self._begin > self.settings.time_limit_s

    def try_step(self, lr: float) -> None:
        """One step more, for a profile: nothing of it is logged or saved."""
        batch = self.batches.order.batch(self.position, self.settings.batch).to(self.device)
        self.update(batch.view(self.settings.accumulate, -1, self.settings.context + 1), lr)

    def _update(self) -> None:
        """One step: its batch in parts, one change of the weights."""
        settings, lr = self.settings, self.settings.lr_at(self.step)
        batch = self.batches.batch(self.position)
        loss, norm = self.update(batch.view(settings.accumulate, -1, settings.context + 1), lr)
        self._pending.append((self.step, loss, norm, lr))
        self.step += 1
        if len(self._pending) >= (READ_EVERY if self.device.type == "cuda" else 1):
            self._read_losses()

    def _read_losses(self) -> None:
        """Steps that are launched, into the log; waits for them."""
        if not self._pending:
            return
        rows = [(step, float(loss), float(norm), lr) for step, loss, norm, lr in self._pending]
        self._pending.clear()
        self._clock.stop()
        tokens_per_s = len(rows) * self.settings.tokens_per_step / max(self._clock.since_s, 1e-9)
        for step, loss, norm, lr in rows:
            self._check_finite(loss, f"loss of step {step}")
            self._check_finite(norm, f"gradients' norm in step {step}")
            row = {"step": step, "loss": loss, "lr": lr, "grad_norm": norm, "tokens_per_s": round(tokens_per_s, 1)}
            self.log.add(row)
            self.first_loss, self.last_loss = loss if self.first_loss is None else self.first_loss, loss
        if self.watch:
            rate = self.tokens_per_s or math.inf
            self.watch(
                Progress(
                    step=self.step,
                    steps=self.settings.steps,
                    loss=rows[-1][1],
                    held_out_loss=None if math.isnan(self.held_out_loss) else self.held_out_loss,
                    tokens_per_s=rate,
                    memory_bytes=self.memory_bytes,
                    left_s=(self.settings.steps - self.step) * self.settings.tokens_per_step / rate,
                )
            )

    def _check_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            raise BadInput(f"the {what} is {value}: start again with a lower --lr (now {self.settings.lr:g})")

    def whole_model(self) -> Gpt2 | None:
        """The whole model, to sample from and to save."""
        return self.model

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over this process's steps, without evaluations; 0 before the first step."""
        done = self.step - self.first_step
        return done * self.settings.tokens_per_step / self._clock.spent_s if self._clock.spent_s else 0.0

    @property
    def memory_bytes(self) -> int:
        """At the peak: of the GPU, or of this process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss of held-out text."""
        self._read_losses()
        self._train_mode(False)
        settings, total, count = self.settings, 0.0, 0
        size = settings.batch // settings.accumulate
        for batch in evaluation_batches(self.data.held_out, settings.context, size, settings.eval_batches):
            total += self._loss_of(batch.to(self.device)) * len(batch)
            count += len(batch)
        self._train_mode(True)
        self.held_out_loss = total / count
        self._check_finite(self.held_out_loss, f"loss of held-out text after {self.step} steps")
        self.log.add({"step": self.step, "held_out_loss": self.held_out_loss})
        if self.held_out_loss < self.best.loss:
            self.best = Best(loss=self.held_out_loss, step=self.step)
            self._keep_best()
        self._clock.restart()
        return self.held_out_loss

    def _keep_best(self) -> None:
        """The weights that know held-out text best: a model that sees its text often unlearns that again."""
        checkpoint.save_file({"step": self.step, "model": self.model.state_dict()}, self.run.best)

    def best_model(self) -> Gpt2 | None:
        """The model as it was when it knew held-out text best, if that was before the last step."""
        if self.best.step == self.step:
            return None
        state = checkpoint.load_file(self.run.best, self.best.step)
        if state is None:  # of a later step, from which a process that was killed left no checkpoint
            return None
        found = Gpt2(self.run.shape, mode="eager", attention="naive")
        found.load_state_dict(state["model"])
        return found

    def _loss_of(self, batch: torch.Tensor) -> float:
        return float(self.model(*split_labels(batch)))

    def _train_mode(self, is_training: bool) -> None:
        self.model.train(is_training)

    def save(self) -> None:
        """A checkpoint, once for each step; what is logged is never behind it."""
        self._read_losses()
        if self.step == self.saved_step:  # a file of this step may lie there that could not be read
            return
        state: dict[str, Any] = {
            "step": self.step,
            "position": self.position,
            "model": self.model.state_dict(),
            "optimizer": self.update.optimizer.state_dict(),
            "random": checkpoint.random_states(),
        }
        checkpoint.save(state, self.run.checkpoints, self.step)
        self.saved_step = self.step
        self._clock.restart()
