"""Softmax of each row: a maximum, an exponential, a sum, and the row read once."""

from __future__ import annotations

from functools import partial

from sublight.learn.record import Exercise, Goal, problem_of, rows_apart

SOFTMAX = Exercise(
    name="softmax",
    chapter="rows",
    problem=partial(problem_of, "softmax", rows_apart),
    cost="softmax",
    arguments=("x",),
    outputs=("out",),
    apart=("x",),
    sizes={"rows": (1, 12), "cols": (1, 1500)},
    shown={"rows": 6, "cols": 1000},
    goal=Goal(shape={"rows": 8192, "cols": 2048}, on_gpu={"rows": 32768, "cols": 2048}),
    needs=("row_sum",),
)
