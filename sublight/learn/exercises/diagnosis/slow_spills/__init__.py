"""A row kernel that holds more values than a thread has registers."""

from __future__ import annotations

from functools import partial

from sublight.learn.record import Exercise, Goal, problem_of

SLOW_SPILLS = Exercise(
    name="slow_spills",
    chapter="diagnosis",
    problem=partial(problem_of, "rms_norm"),
    cost="rms_norm",
    arguments=("x", "weight"),
    outputs=("out",),
    apart=("x",),
    sizes={"rows": (1, 4), "cols": (1, 3000)},
    shown={"rows": 3, "cols": 2000},
    goal=Goal(shape={"rows": 1024, "cols": 16384}, fraction=0.9, on_gpu={"rows": 4096, "cols": 16384}),
    needs=("rms_norm",),
    answers={"CAUSE": "spills"},
)
