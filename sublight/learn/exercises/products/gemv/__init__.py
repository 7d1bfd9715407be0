"""A matrix times a vector: each weight is used once, so memory decides and not the tensor cores."""

from __future__ import annotations

from functools import partial
from typing import Any

from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.learn.record import Exercise, Goal, problem_of, rounded_once


def of_op(shape: Shape) -> Shape:
    return {"m": 1, "n": shape["rows"], "k": shape["cols"]}


def _as_vector(x: Any, weight: Any) -> Any:
    """The op has activations of 1 by k, and the weight turned."""
    return weight.T, x[0]


def _turned(reference: Any) -> Any:
    return rounded_once(lambda weight, x: reference(x[None], weight.T)[0])


def cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("matmul")(of_op(shape), dtype, "fwd")


GEMV = Exercise(
    name="gemv",
    chapter="products",
    problem=partial(problem_of, "matmul", arrange=_as_vector, shape_of=of_op, around=_turned),
    cost=cost,
    arguments=("weight", "x"),
    outputs=("out",),
    apart=("weight",),
    sizes={"rows": (1, 60), "cols": (1, 1500)},
    shown={"rows": 30, "cols": 1000},
    goal=Goal(shape={"rows": 8192, "cols": 4096}, dtype="float16", fraction=0.85, on_gpu={"rows": 32768, "cols": 4096}),
    needs=("row_sum",),
    dtypes=("float16", "bfloat16"),
)
