"""Rows gathered from one place and scattered to another: addresses that come from memory."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    from sublight import ops

    op = ops.find("embedding")

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        import torch

        rows = shape["rows"]
        _, x = op.inputs({**shape, "vocab": rows}, dtype, device, seed)
        if device == "meta":
            return x, *(torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
        luck = torch.Generator(device).manual_seed(seed)
        return x, *(torch.randperm(rows, generator=luck, device=device) for _ in range(2))

    def reference(x: Any, take: Any, put: Any) -> Any:
        taken = op.reference(take, x)
        return taken.new_empty(taken.shape).index_copy_(0, put, taken)

    return Problem(reference=reference, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    each = size_bytes(shape["rows"] * shape["cols"], dtype)
    return Cost(read_bytes=each + 2 * size_bytes(shape["rows"], "int64"), write_bytes=each)  # x, take and put; out


PERMUTE_ROWS = Exercise(
    name="permute_rows",
    chapter="movement",
    problem=problem,
    cost=cost,
    arguments=("x", "take", "put"),
    outputs=("out",),
    sizes={"rows": (1, 12), "cols": (1, 900)},
    shown={"rows": 7, "cols": 600},
    goal=Goal(shape={"rows": 16384, "cols": 1024}, on_gpu={"rows": 65536, "cols": 1024}),
    needs=("add_2d",),
)
