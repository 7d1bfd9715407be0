"""An xray page, read: which access moves too many sectors, and what to do about it."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    from sublight import ops

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        rows, cols = shape["rows"], shape["cols"]
        x, y = ops.find("add").inputs({"numel": rows * cols}, dtype, device, seed)
        return x.view(rows, cols), y.view(cols, rows)

    def reference(x: Any, y: Any) -> Any:
        return x + y.T

    return Problem(reference=reference, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    each = size_bytes(shape["rows"] * shape["cols"], dtype)
    return Cost(read_bytes=2 * each, write_bytes=each)  # read x and y, write out


READ_XRAY = Exercise(
    name="read_xray",
    chapter="diagnosis",
    problem=problem,
    cost=cost,
    arguments=("x", "y"),
    outputs=("out",),
    sizes={"rows": (1, 100), "cols": (1, 100)},
    shown={"rows": 70, "cols": 50},
    goal=Goal(shape={"rows": 4096, "cols": 2048}, on_gpu={"rows": 16384, "cols": 2048}),
    needs=("transpose",),
    answers={"WORST": "y", "SECTORS": 32},
)
