"""The sum of each row: a program holds a row, and a reduction makes one number of it."""

from __future__ import annotations

from sublight.correct import Inputs
from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.learn.record import Exercise, Goal, Problem


def of_op(shape: Shape) -> Shape:
    """As the op names the dimensions."""
    return {"outer": shape["rows"], "n": shape["cols"], "inner": 1}


def problem() -> Problem:
    from sublight import ops

    op = ops.find("reduce_sum")

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        return (op.inputs(of_op(shape), dtype, device, seed)[0].squeeze(1),)

    return Problem(reference=op.reference, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("reduce_sum")(of_op(shape), dtype, "fwd")


ROW_SUM = Exercise(
    name="row_sum",
    chapter="rows",
    problem=problem,
    cost=cost,
    arguments=("x",),
    outputs=("out",),
    apart=("x",),
    sizes={"rows": (1, 90), "cols": (1, 1500)},  # of few rows the sum of bfloat16 as it comes is right by chance
    shown={"rows": 6, "cols": 1000},
    goal=Goal(shape={"rows": 8192, "cols": 2048}, on_gpu={"rows": 32768, "cols": 2048}),
    needs=("add_2d",),
)
