"""Cross entropy of each row: the log of a sum of exponentials, less the value that a label points to."""

from __future__ import annotations

from functools import partial

from sublight.learn.record import Exercise, Goal, problem_of

CROSS_ENTROPY = Exercise(
    name="cross_entropy",
    chapter="rows",
    problem=partial(problem_of, "cross_entropy", reduction="none"),
    cost="cross_entropy",
    arguments=("logits", "labels"),
    outputs=("loss",),
    apart=("logits", "labels"),
    sizes={"rows": (1, 6), "cols": (2, 3000)},
    shown={"rows": 4, "cols": 2000},
    goal=Goal(shape={"rows": 2048, "cols": 8192}, on_gpu={"rows": 8192, "cols": 8192}),
    needs=("online_softmax",),
)
