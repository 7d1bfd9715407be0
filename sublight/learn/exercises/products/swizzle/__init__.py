"""On paper: the order of tiles, in groups, so that programs that run at once share what they read."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape
from sublight.learn.record import Exercise, Problem


def problem() -> Problem:
    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        import torch

        return tuple(torch.full((), shape[name], device=device, dtype=torch.int64) for name in SIZES)

    return Problem(reference=reference, inputs=inputs)


def reference(down: Any, across: Any, group: Any) -> Any:
    """Every program's tile, in the order of the programs; by lists of tiles, group after group."""
    import torch

    tiles = [
        (row, col)
        for first in range(0, int(down), int(group))
        for col in range(int(across))
        for row in range(first, min(first + int(group), int(down)))
    ]
    return tuple(torch.tensor(each, dtype=torch.float64) for each in zip(*tiles, strict=True))


SIZES = {"down": (1, 12), "across": (1, 12), "group": (1, 8)}
SWIZZLE = Exercise(
    name="swizzle",
    chapter="products",
    problem=problem,
    cost=lambda shape, dtype: Cost(read_bytes=0, write_bytes=0),
    arguments=("down", "across", "group"),
    outputs=("rows", "cols"),
    sizes=SIZES,
    shown={"down": 6, "across": 4, "group": 3},
    goal=None,
    needs=("matmul",),
    kind="paper",
    dtypes=("float64",),
)
