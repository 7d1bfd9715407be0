"""How many programs fill a GPU: the same copy by few programs that loop, from too few to enough."""

from __future__ import annotations

from sublight.learn.exercises.first.copy import cost, problem
from sublight.learn.record import Exercise, Goal

BLOCKS = Exercise(
    name="blocks",
    chapter="first",
    problem=problem,
    cost=cost,
    arguments=("x",),
    outputs=("out",),
    apart=("x",),
    sizes={"numel": (1, 9000)},
    shown={"numel": 5000},
    goal=Goal(shape={"numel": 2**22}, on_gpu={"numel": 2**26}),
    needs=("copy",),
)
