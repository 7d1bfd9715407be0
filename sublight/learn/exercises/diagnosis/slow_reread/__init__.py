"""A division by the largest magnitude, which every program looks for in the whole tensor."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    from sublight import ops

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        return (ops.find("add").inputs(shape, dtype, device, seed)[0],)

    def reference(x: Any) -> Any:
        return x / x.abs().max()

    return Problem(reference=reference, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    each = size_bytes(shape["numel"], dtype)
    return Cost(read_bytes=2 * each, write_bytes=each)  # read x for its maximum, and again to divide it; write out


SLOW_REREAD = Exercise(
    name="slow_reread",
    chapter="diagnosis",
    problem=problem,
    cost=cost,
    arguments=("x",),
    outputs=("out",),
    sizes={"numel": (1, 9000)},
    shown={"numel": 6000},
    goal=Goal(shape={"numel": 2**20}, fraction=0.5, on_gpu={"numel": 2**24}),
    needs=("row_sum", "compact"),
    answers={"CAUSE": "read again"},
)
