"""LayerNorm forward: mean and variance of a row that is read once."""

from __future__ import annotations

from functools import partial

from sublight.learn.record import Exercise, Goal, problem_of

LAYER_NORM = Exercise(
    name="layer_norm",
    chapter="rows",
    problem=partial(problem_of, "layer_norm"),
    cost="layer_norm",
    arguments=("x", "weight", "bias"),
    outputs=("out",),
    apart=("x",),
    sizes={"rows": (1, 12), "cols": (2, 1500)},
    shown={"rows": 6, "cols": 1000},
    goal=Goal(shape={"rows": 8192, "cols": 2048}, on_gpu={"rows": 32768, "cols": 2048}),
    needs=("softmax",),
)
