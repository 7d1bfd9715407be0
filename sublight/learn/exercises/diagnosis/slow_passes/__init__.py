"""Bias and GELU in three launches, each of which writes what the next one reads."""

from __future__ import annotations

from functools import partial

from sublight.learn.record import Exercise, Goal, problem_of

SLOW_PASSES = Exercise(
    name="slow_passes",
    chapter="diagnosis",
    problem=partial(problem_of, "bias_gelu"),
    cost="bias_gelu",
    arguments=("x", "bias"),
    outputs=("out",),
    apart=("x",),
    sizes={"rows": (1, 6), "cols": (1, 900)},
    shown={"rows": 4, "cols": 600},
    goal=Goal(shape={"rows": 4096, "cols": 2048}, on_gpu={"rows": 32768, "cols": 2048}),
    needs=("multiply_add",),
    answers={"CAUSE": "unfused"},
)
