"""A product of matrices: from one column of k at a time to tiles on the tensor cores."""

from __future__ import annotations

from functools import partial

from sublight.learn.record import Exercise, Goal, problem_of, rounded_once

MATMUL = Exercise(
    name="matmul",
    chapter="products",
    problem=partial(problem_of, "matmul", around=rounded_once),
    cost="matmul",
    arguments=("a", "b"),
    outputs=("out",),
    apart=("a",),
    sizes={"m": (1, 90), "n": (1, 90), "k": (1, 90)},
    shown={"m": 70, "n": 50, "k": 80},
    goal=Goal(
        shape={"m": 2048, "n": 2048, "k": 1024}, dtype="float16", fraction=0.5, on_gpu={"m": 4096, "n": 4096, "k": 4096}
    ),
    needs=("transpose", "strides"),
    dtypes=("float16", "bfloat16"),
)
