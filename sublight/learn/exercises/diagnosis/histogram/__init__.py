"""A histogram with a race: lanes and programs add to the same bins, and lose each other's counts."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem

BINS = 256


def problem() -> Problem:
    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        import torch

        luck = None if device == "meta" else torch.Generator(device).manual_seed(seed)
        return (torch.randint(BINS, (shape["numel"],), generator=luck, device=device, dtype=torch.int32),)

    def reference(x: Any) -> Any:
        import torch

        counts = torch.zeros(BINS, dtype=torch.int32, device=x.device)
        return counts.index_add(0, x, torch.ones_like(x))

    return Problem(reference=reference, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    return Cost(read_bytes=size_bytes(shape["numel"], "int32"), write_bytes=size_bytes(BINS, "int32"))


HISTOGRAM = Exercise(
    name="histogram",
    chapter="diagnosis",
    problem=problem,
    cost=cost,
    arguments=("x",),
    outputs=("out",),
    sizes={"numel": (1, 5000)},
    shown={"numel": 3000},
    goal=Goal(shape={"numel": 2**19}, dtype="int32", fraction=0.2, on_gpu={"numel": 2**26}),
    needs=("embedding_backward",),
    dtypes=("int32",),
)
