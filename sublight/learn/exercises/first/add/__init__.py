"""Vector addition: two loads, one store, and a grid that covers every element."""

from __future__ import annotations

from functools import partial

from sublight.learn.record import Exercise, Goal, problem_of

ADD = Exercise(
    name="add",
    chapter="first",
    problem=partial(problem_of, "add"),
    cost="add",
    arguments=("x", "y"),
    outputs=("out",),
    apart=("x", "y"),
    sizes={"numel": (1, 4000)},
    shown={"numel": 2500},
    goal=Goal(shape={"numel": 2**24}, on_gpu={"numel": 2**26}),
    needs=("copy",),
)
