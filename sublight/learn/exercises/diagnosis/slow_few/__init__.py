"""An activation by four programs, on a GPU with room for thousands."""

from __future__ import annotations

from functools import partial

from sublight.cost import Cost, Shape
from sublight.learn.exercises.first.copy import cost as cost_of_copy
from sublight.learn.record import Exercise, Goal, problem_of


def cost(shape: Shape, dtype: str) -> Cost:
    return cost_of_copy({"numel": shape["rows"] * shape["cols"]}, dtype)


SLOW_FEW = Exercise(
    name="slow_few",
    chapter="diagnosis",
    problem=partial(problem_of, "relu2"),
    cost=cost,
    arguments=("x",),
    outputs=("out",),
    apart=("x",),
    sizes={"rows": (1, 40), "cols": (1, 400)},
    shown={"rows": 20, "cols": 300},
    goal=Goal(shape={"rows": 4096, "cols": 2048}, on_gpu={"rows": 32768, "cols": 2048}),
    needs=("blocks",),
    answers={"CAUSE": "few programs"},
)
