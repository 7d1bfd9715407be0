"""A tiny run for tests: a text that a model learns in some steps, and settings that take milliseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sublight.engines.train import data, run
from sublight.engines.train.loop import Trainer
from sublight.engines.train.settings import Settings
from sublight.engines.train.shape import Shape

TEXT = "the quick brown fox jumps over the lazy dog; " * 40
PLAIN = Settings(
    steps=40, batch=4, context=16, lr=5e-3, warmup=4, dropout=0.1, mode="eager", attention="naive",
    eval_every=10, eval_batches=2, save_every=7,
)  # fmt: skip


def tiny_trainer(folder: Path, device: str = "cpu", **changes: Any) -> Trainer:
    """A trainer for the run in the folder, or for a new run."""
    if (folder / run.NAME).exists():
        found = run.opened(folder)
        return Trainer(found, data.opened(found.tokens), torch.device(device))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    tokens = data.prepare(folder / "text.txt", "char", folder / "tokens")
    shape = Shape(layers=2, dim=32, heads=2, context=changes.get("context", 16), vocab=64)
    new = run.Run(folder=folder, shape=shape, settings=replace(PLAIN, **changes))
    new.write()
    return Trainer(new, tokens, torch.device(device))
