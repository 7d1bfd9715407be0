"""A tiny run on several CPU processes, for tests: torchrun starts this module.

    torchrun --nproc-per-node 2 -m sublight.engines.train.parallel.fakes FOLDER ddp 8 [RANK STEP]

A rank that is named dies at that step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from sublight.engines.train import data, run
from sublight.engines.train.fakes import PLAIN, TEXT
from sublight.engines.train.parallel.ranks import joined
from sublight.engines.train.parallel.trainer import SharedTrainer
from sublight.engines.train.run import Run
from sublight.engines.train.shape import Shape

SHAPE = Shape(layers=4, dim=32, heads=4, context=16, vocab=64)


def made(folder: Path, parallel: str, steps: int) -> Run:
    """The run in the folder, or a new one."""
    from dataclasses import replace

    if not (folder / run.NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        data.prepare(folder / "text.txt", "char", folder / "tokens")
        changes: dict[str, Any] = {"batch": 8, "accumulate": 2, "steps": 12, "dropout": 0.0, "save_every": 4}
        settings = replace(PLAIN, **changes, parallel=parallel, eval_every=6, clip=0.5)
        run.Run(folder=folder, shape=SHAPE, settings=settings).write()
    found = run.opened(folder)
    return Run(folder=folder, shape=found.shape, settings=replace(found.settings, steps=steps))


def main(folder: str, parallel: str, steps: str, dies: str = "-1", at: str = "0") -> None:
    torch.set_num_threads(1)
    with joined("cpu") as ranks:
        found = ranks.first_does(lambda: made(Path(folder), parallel, int(steps)))
        trainer = SharedTrainer(found, data.opened(found.tokens), ranks)
        update = trainer._update

        def step() -> None:
            if ranks.rank == int(dies) and trainer.step == int(at):
                os._exit(9)
            update()

        trainer._update = step  # type: ignore[method-assign]
        trainer.train()
        whole = trainer.whole_model()
        if whole is not None:
            torch.save(whole.state_dict(), Path(folder) / "whole.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
