"""Transpose: reads along rows, writes along columns, and a tile that makes both good."""

from __future__ import annotations

from sublight.correct import Inputs
from sublight.cost import Cost, Shape
from sublight.learn.exercises.first.copy import cost as cost_of_copy
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    from sublight import ops

    op = ops.find("transpose")

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        return (op.inputs({"batch": 1, **shape}, dtype, device, seed)[0][0],)

    return Problem(reference=op.reference, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    return cost_of_copy({"numel": shape["rows"] * shape["cols"]}, dtype)


TRANSPOSE = Exercise(
    name="transpose",
    chapter="movement",
    problem=problem,
    cost=cost,
    arguments=("x",),
    outputs=("out",),
    sizes={"rows": (1, 150), "cols": (1, 130)},
    shown={"rows": 100, "cols": 70},
    goal=Goal(shape={"rows": 4096, "cols": 4096}, on_gpu={"rows": 8192, "cols": 8192}),
    needs=("add_2d",),
)
