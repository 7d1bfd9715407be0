"""Softmax of rows that are longer than a block: maximum and sum are kept up to date chunk by chunk."""

from __future__ import annotations

from functools import partial

from sublight.learn.record import Exercise, Goal, problem_of, rows_apart

ONLINE_SOFTMAX = Exercise(
    name="online_softmax",
    chapter="rows",
    problem=partial(problem_of, "online_softmax", rows_apart),
    cost="online_softmax",
    arguments=("x",),
    outputs=("out", "log_sum"),
    apart=("x",),
    sizes={"rows": (1, 4), "cols": (1, 2600)},
    shown={"rows": 3, "cols": 2500},
    goal=Goal(shape={"rows": 2048, "cols": 8192}, fraction=0.6, on_gpu={"rows": 8192, "cols": 8192}),
    needs=("online_by_hand",),
)
