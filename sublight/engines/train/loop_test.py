"""The loop learns, and a run that is broken off anywhere, by kill -9 too, goes on bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from sublight import correct
from sublight.engines.train import checkpoint, log
from sublight.engines.train.fakes import tiny_trainer
from sublight.engines.train.loop import Best
from sublight.engines.train.sample import sample
from sublight.errors import BadInput

ROOT = Path(__file__).parents[3]
START_S = 120  # until a process on a busy machine has imported torch and made some steps


def curve(folder: Path) -> list[dict[str, Any]]:
    """The log without what a clock gave."""
    rows = log.read(folder / log.NAME)
    return [{key: value for key, value in row.items() if key != "tokens_per_s"} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    tiny_trainer(folder).train()
    return folder


def test_the_loss_falls_and_samples_are_of_the_text(whole: Path) -> None:
    losses = [row["loss"] for row in curve(whole) if "loss" in row]
    held_out = [row["held_out_loss"] for row in curve(whole) if "held_out_loss" in row]
    assert len(losses) == 40 and len(held_out) == 5
    assert losses[-1] < 0.6 * losses[0] and held_out[-1] < 0.6 * held_out[0]
    trainer = tiny_trainer(whole)
    trainer.train()  # nothing is left to do but the last evaluation
    words = trainer.data.tokenizer
    before = torch.get_rng_state()
    text = words.decode(sample(trainer.model, words.encode("the ").tolist(), 40, vocab=words.vocab, seed=1))
    assert len(text) == 40 and trainer.model.training
    assert torch.equal(torch.get_rng_state(), before)  # sampling draws from a generator of its own


@pytest.mark.parametrize("stop_at", [1, 7, 10, 25])  # between checkpoints, at one, at an evaluation
def test_a_stopped_run_goes_on_bit_for_bit(whole: Path, tmp_path: Path, stop_at: int) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.watch = lambda now: setattr(trainer, "stop_wanted", now.step >= stop_at)
    trainer.train()
    assert trainer.step == stop_at
    tiny_trainer(tmp_path).train()
    assert curve(tmp_path) == curve(whole)
    assert_same_end(tmp_path, whole)


def assert_same_end(folder: Path, whole: Path) -> None:
    mine, theirs = (checkpoint.load(each / "checkpoints") for each in (folder, whole))
    assert mine is not None and theirs is not None and mine["step"] == theirs["step"] == 40
    assert all(torch.equal(x, theirs["model"][name]) for name, x in mine["model"].items())


def test_kill_9_loses_at_most_an_interval_and_the_curve_is_the_same(whole: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from sublight.engines.train.fakes import tiny_trainer as t; "
    process = subprocess.Popen([sys.executable, "-c", f"{code}t(Path(sys.argv[1])).train()", str(tmp_path)], cwd=ROOT)
    until = time.monotonic() + START_S
    while len(log.read(tmp_path / log.NAME)) < 13 and time.monotonic() < until and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reached = max(row["step"] for row in curve(tmp_path))
    trainer = tiny_trainer(tmp_path)
    assert reached - trainer.step <= 7  # --save-every
    trainer.train()
    assert curve(tmp_path) == curve(whole)
    assert_same_end(tmp_path, whole)


def test_a_batch_in_parts_is_the_batch(tmp_path: Path) -> None:
    """By the gradients of one step: Adam makes much of their last digit, so later steps may differ."""

    def gradients(seed: int, dtype: torch.dtype, accumulate: int) -> torch.Tensor:
        folder = tmp_path / f"{seed} {dtype} {accumulate}"
        trainer = tiny_trainer(folder, dropout=0.0, accumulate=accumulate, seed=seed)
        trainer.model.to(dtype).compute = dtype
        trainer._update()
        trainer.log.close()
        assert len(kept) == 1
        return kept.pop()

    kept: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        kept.append(torch.cat([p.grad.flatten() for p in params if p.grad is not None]))

    def draw(seed: int, parts_seed: int | None = None) -> list[correct.Error]:
        truth, whole = (gradients(seed, dtype, 1) for dtype in (torch.float64, torch.float32))
        parts = gradients(seed if parts_seed is None else parts_seed, torch.float32, 4)
        return [correct.error("gradients", parts, whole, truth)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", keep)
        assert correct.settled(draw).ok
        assert not draw(100, parts_seed=101)[0].ok


def test_another_seed_is_another_run(whole: Path, tmp_path: Path) -> None:
    tiny_trainer(tmp_path, seed=1, steps=5).train()
    assert curve(tmp_path)[1]["loss"] != curve(whole)[1]["loss"]


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_sound_checkpoints(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)

    def spoil(now: Any) -> None:
        if now.step == 9:
            trainer.model.tokens.data.fill_(float("nan"))

    trainer.watch = spoil
    with pytest.raises(BadInput, match="lower --lr"):
        trainer.train()
    state = checkpoint.load(tmp_path / "checkpoints")
    assert state is not None and state["step"] == 7
    assert all(x.isfinite().all() for x in state["model"].values())


def test_the_time_limit_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, time_limit_s=1e-9)
    trainer.train()
    assert trainer.step == 0 and checkpoint.steps(tmp_path / "checkpoints") == [0]


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(whole: Path, tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.train()
    assert checkpoint.steps(tmp_path / "checkpoints") == [35, 40]
    newest = checkpoint.path_of(tmp_path / "checkpoints", 40)
    newest.write_bytes(newest.read_bytes()[:4000])
    again = tiny_trainer(tmp_path)
    assert again.step == 35
    again.log.close()
    checkpoint.path_of(tmp_path / "checkpoints", 35).write_bytes(b"no checkpoint")
    with pytest.raises(BadInput, match="can be read"):
        tiny_trainer(tmp_path)


def test_the_weights_that_knew_held_out_text_best_are_kept(tmp_path: Path) -> None:
    losses, seen = {0: 3.0, 2: 1.0, 4: 2.0, 6: 1.5}, {}

    def loss_of(batch: torch.Tensor) -> float:
        seen[trainer.step] = trainer.model.tokens.detach().clone()
        return losses[trainer.step]

    trainer = tiny_trainer(tmp_path, steps=6, eval_every=2)
    assert trainer.best_model() is None
    trainer._loss_of = loss_of  # type: ignore[method-assign]
    trainer.train()
    assert (trainer.best.loss, trainer.best.step) == (1.0, 2)
    best = trainer.best_model()
    assert best is not None and torch.equal(best.tokens, seen[2]) and not torch.equal(best.tokens, seen[6])
    again = tiny_trainer(tmp_path)
    again.log.close()
    assert again.best == trainer.best


def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save({"step": 1}, tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left"):
        checkpoint.save({"step": 2}, tmp_path, 2)
    assert checkpoint.load(tmp_path) == {"step": 1} and [file.name for file in tmp_path.iterdir()] == [
        "step-00000001.pt"
    ]


def test_half_a_line_of_the_log_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / log.NAME
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    kept = log.Log(path, from_step=5)
    kept.add({"step": 1, "loss": 2.0})
    kept.close()
    assert [row["loss"] for row in log.read(path)] == [1.0, 2.0]


@pytest.mark.gpu
def test_on_a_gpu_a_deterministic_run_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph from its fifth step on, wherever it began; with dropout, in bf16."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    how: dict[str, Any] = {"mode": "ours", "attention": "ours", "dtype": "bfloat16", "deterministic": True}
    how["context"] = 144  # keys in several blocks, whose shares of a gradient are added up in some order
    try:
        whole, broken = tmp_path / "whole", tmp_path / "broken"
        trainer = tiny_trainer(whole, "cuda", **how)
        trainer.train()
        assert trainer.update.graph is not None and not trainer.update.why_no_graph()
        trainer = tiny_trainer(broken, "cuda", **how)
        trainer.watch = lambda now: setattr(trainer, "stop_wanted", now.step >= 17)
        trainer.train()
        assert 17 <= trainer.step < 40
        tiny_trainer(broken, "cuda").train()
        assert curve(broken) == curve(whole)
        assert_same_end(broken, whole)
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_checkpoint_that_cannot_be_read_is_written_anew(whole: Path, tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.watch = lambda now: setattr(trainer, "stop_wanted", now.step >= 14)
    trainer.train()
    newest = checkpoint.path_of(tmp_path / "checkpoints", 14)
    newest.write_bytes(newest.read_bytes()[:1000])
    again = tiny_trainer(tmp_path)
    assert again.step == 7
    again.watch = lambda now: setattr(again, "stop_wanted", now.step >= 16)
    again.train()
    assert checkpoint.load_file(newest, 14) is not None
    tiny_trainer(tmp_path).train()
    assert curve(tmp_path) == curve(whole)


@pytest.mark.parametrize("left", ["a later step's", "half of it"])
def test_the_best_weights_are_those_of_the_step_that_is_told(tmp_path: Path, left: str) -> None:
    """A process that was killed may have left better ones, from behind its last checkpoint."""
    trainer = tiny_trainer(tmp_path, steps=12)
    trainer.train()
    trainer.best = Best(loss=0.0, step=10)
    trainer.step = 12
    trainer.run.best.unlink()
    weights = {name: x + 1 for name, x in trainer.model.state_dict().items()}
    checkpoint.save_file({"step": 10, "model": weights}, trainer.run.best)
    best = trainer.best_model()
    assert best is not None and torch.equal(best.tokens, trainer.model.tokens + 1)
    if left == "half of it":
        trainer.run.best.write_bytes(trainer.run.best.read_bytes()[:1000])
    else:
        checkpoint.save_file({"step": 11, "model": weights}, trainer.run.best)
    assert trainer.best_model() is None


def test_held_out_text_that_gives_no_number_is_said(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.model.tokens.data.fill_(float("nan"))
    with pytest.raises(BadInput, match="held-out text after 0 steps is nan: start again with a lower --lr"):
        trainer.train()


def test_a_full_disk_that_torch_alone_notices_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any, file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 161856 vs 161744")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(BadInput, match="is the disk full"):
        checkpoint.save_file({}, tmp_path / "step-00000001.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk_ends_in_a_line(tmp_path: Path) -> None:
    made = log.Log(tmp_path / log.NAME, from_step=0)
    made.close()
    made._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(BadInput, match="No space left"):
        made.add({"step": 0})
    made.close()  # which tries to write what is left
