"""RMSNorm: LayerNorm without a mean; a second chance to write a row kernel from an empty page."""

from __future__ import annotations

from functools import partial

from sublight.learn.record import Exercise, Goal, problem_of

RMS_NORM = Exercise(
    name="rms_norm",
    chapter="rows",
    problem=partial(problem_of, "rms_norm"),
    cost="rms_norm",
    arguments=("x", "weight"),
    outputs=("out",),
    apart=("x",),
    sizes={"rows": (1, 12), "cols": (1, 1500)},
    shown={"rows": 6, "cols": 1000},
    goal=Goal(shape={"rows": 8192, "cols": 2048}, on_gpu={"rows": 32768, "cols": 2048}),
    needs=("layer_norm",),
)
