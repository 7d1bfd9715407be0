"""The loop on several ranks: each step they compute together, rank 0 writes the log; losses are one process's.

With dropout they are not: its random numbers follow from the seed, the step and the rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from sublight.engines.train.data import Data
from sublight.engines.train.gpt2 import Block, Gpt2
from sublight.engines.train.log import Log
from sublight.engines.train.loop import Trainer, Watch
from sublight.engines.train.parallel import checkpoint
from sublight.engines.train.parallel.blocks import SplitBlock, in_rows
from sublight.engines.train.parallel.layouts import LAYOUTS, Layout, is_sliced, local
from sublight.engines.train.parallel.ranks import Ranks
from sublight.engines.train.run import Run
from sublight.engines.train.settings import Settings
from sublight.engines.train.update import BETA1, Result


class SharedUpdate:
    """One change of weights that several ranks hold."""

    def __init__(self, layout: Layout, settings: Settings, ranks: Ranks) -> None:
        self.layout, self.settings, self.ranks = layout, settings, ranks
        weights = list(layout.module.parameters())
        groups = [  # PyTorch changes many weights at once, but not sliced ones together with whole ones
            {"params": found, "weight_decay": decay}
            for sliced in (True, False)
            for is_matrix, decay in ((True, settings.weight_decay), (False, 0.0))
            if (found := [p for p in weights if is_sliced(p) == sliced and (p.dim() >= 2) == is_matrix])
        ]
        on_gpu = ranks.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(BETA1, settings.beta2), fused=on_gpu)

    def prepare(self) -> None:
        """Nothing is copied: PyTorch's ways hold the weights themselves."""

    def __call__(self, batch: torch.Tensor, lr: float) -> Result:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.layout.gradients(batch)
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    @torch.no_grad()
    def _clip(self) -> torch.Tensor:
        """The norm of all gradients, and those scaled down to the longest that is allowed."""
        module, stages = self.layout.module, self.settings.parallel == "pp"
        here, everywhere = (torch.zeros((), device=self.ranks.device) for _ in range(2))
        for name, p in module.named_parameters():
            if p.grad is None or (stages and name == "tokens" and not self.ranks.is_first):
                continue  # the last stage's table is the first one's
            squares = local(p.grad).float().square().sum()
            if stages or is_sliced(p):
                here += squares
            else:
                everywhere += squares
        norm = (self.ranks.total(here) + everywhere).sqrt()
        if self.settings.clip:
            factor = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
            for p in module.parameters():
                if p.grad is not None:
                    local(p.grad).mul_(factor)
        return norm


class SharedTrainer(Trainer):
    """A run of which this process computes a share."""

    def __init__(self, run: Run, data: Data, ranks: Ranks, watch: Watch | None = None) -> None:
        self.ranks = ranks
        super().__init__(run, data, ranks.device, watch if ranks.is_first else None)

    def _block(self) -> type[Block]:
        return SplitBlock if self.settings.parallel == "tp" else Block

    def _updated(self) -> Any:
        self.layout = LAYOUTS[self.settings.parallel](self.model, self.settings, self.ranks)
        return SharedUpdate(self.layout, self.settings, self.ranks)

    def _new_log(self) -> Log:
        log = super()._new_log() if self.ranks.is_first else Log.silent()
        self.ranks.any(False)
        return log

    def _restore(self) -> None:
        found = checkpoint.load(self.layout.module, self.update.optimizer, self.run.checkpoints, self.ranks)
        if found is not None:
            self.step = self.saved_step = found

    def _is_over(self) -> bool:
        return self.ranks.any(super()._is_over())

    def _update(self) -> None:
        if self.settings.dropout:
            by_rank = self.ranks.rank if self.settings.parallel != "tp" else 0  # what all have must be dropped alike
            torch.manual_seed(self.settings.seed + 1_000_003 * self.step + by_rank)
        super()._update()

    def _loss_of(self, batch: torch.Tensor) -> float:
        return float(self.layout.loss(batch))

    def _train_mode(self, is_training: bool) -> None:
        self.layout.module.train(is_training)

    def _keep_best(self) -> None:
        """Weights lie on several ranks: the checkpoints have them."""

    def save(self) -> None:
        self._read_losses()
        if self.step == self.saved_step:
            return
        checkpoint.save(self.layout.module, self.update.optimizer, self.run.checkpoints, self.step, self.ranks)
        self.saved_step = self.step
        self._clock.restart()

    def whole_model(self) -> Gpt2 | None:
        """On rank 0, and in one piece: to sample from, and to save. All ranks must call it."""
        state: dict[str, Any]
        if self.settings.parallel == "pp":
            parts: list[Any] = [None] * self.ranks.world
            mine = {name: x.cpu() for name, x in self.layout.module.state_dict().items()}
            dist.gather_object(mine, parts if self.ranks.is_first else None)
            state = {name: x for part in parts if part for name, x in part.items()}
        else:
            how = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = dict(get_model_state_dict(self.layout.module, options=how))
        if not self.ranks.is_first:
            return None
        if self.settings.parallel == "tp":
            for name in [name for name in state if ".qkv." in name]:
                state[name] = in_rows(state[name], self.run.shape.heads)
        model = Gpt2(self.run.shape, mode=self.settings.mode, attention="naive")
        model.load_state_dict(state)
        return model.eval()
