"""A sum of columns whose neighbouring lanes read far apart."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    from sublight import ops

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        rows, cols = shape["rows"], shape["cols"]
        return (ops.find("add").inputs({"numel": rows * cols}, dtype, device, seed)[0].view(rows, cols),)

    def reference(x: Any) -> Any:
        return ops.find("reduce_sum").reference(x, 0)

    return Problem(reference=reference, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    return Cost(
        read_bytes=size_bytes(shape["rows"] * shape["cols"], dtype), write_bytes=size_bytes(shape["cols"], dtype)
    )  # read x, write out


SLOW_COLUMNS = Exercise(
    name="slow_columns",
    chapter="diagnosis",
    problem=problem,
    cost=cost,
    arguments=("x",),
    outputs=("out",),
    sizes={"rows": (1, 300), "cols": (1, 60)},
    shown={"rows": 200, "cols": 40},
    goal=Goal(shape={"rows": 2048, "cols": 8192}, fraction=0.8, on_gpu={"rows": 2048, "cols": 32768}),
    needs=("transpose",),
    answers={"CAUSE": "strided"},
)
