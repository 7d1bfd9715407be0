"""Addition of matrices whose rows have gaps between them: addresses by strides, a mask in two dimensions."""

from __future__ import annotations

from sublight.correct import Inputs
from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.learn.record import Exercise, Goal, Problem

GAP = 3  # elements behind each row of x that are not x's


def problem() -> Problem:
    from sublight import ops

    op = ops.find("add")

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        rows, cols = shape["rows"], shape["cols"]
        x, y = op.inputs({"numel": rows * (cols + GAP)}, dtype, device, seed)
        return x.view(rows, cols + GAP)[:, :cols], y[: rows * cols].view(rows, cols)

    return Problem(reference=op.reference, inputs=inputs)


def cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("add")({"numel": shape["rows"] * shape["cols"]}, dtype, "fwd")


ADD_2D = Exercise(
    name="add_2d",
    chapter="first",
    problem=problem,
    cost=cost,
    arguments=("x", "y"),
    outputs=("out",),
    apart=("x", "y"),
    sizes={"rows": (1, 70), "cols": (1, 300)},
    shown={"rows": 50, "cols": 200},
    goal=Goal(shape={"rows": 4096, "cols": 4096}, fraction=0.8, on_gpu={"rows": 8192, "cols": 8192}),
    needs=("add", "strides"),
)
