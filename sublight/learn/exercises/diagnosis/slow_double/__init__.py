"""An activation that computes in float64, where nobody asked for it."""

from __future__ import annotations

from functools import partial

from sublight.cost import Cost, Shape
from sublight.learn.exercises.first.copy import cost as cost_of_copy
from sublight.learn.record import Exercise, Goal, problem_of


def cost(shape: Shape, dtype: str) -> Cost:
    return cost_of_copy({"numel": shape["rows"] * shape["cols"]}, dtype)


SLOW_DOUBLE = Exercise(
    name="slow_double",
    chapter="diagnosis",
    problem=partial(problem_of, "gelu"),
    cost=cost,
    arguments=("x",),
    outputs=("out",),
    apart=("x",),
    sizes={"rows": (1, 6), "cols": (1, 900)},
    shown={"rows": 4, "cols": 600},
    goal=Goal(shape={"rows": 4096, "cols": 2048}, on_gpu={"rows": 32768, "cols": 2048}),
    needs=("softmax",),
    answers={"CAUSE": "float64"},
)
