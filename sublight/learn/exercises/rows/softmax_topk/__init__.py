"""Softmax and its largest entries in one pass: what a router of experts and a sampler need."""

from __future__ import annotations

from functools import partial

from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, problem_of

K = 4


def cost(shape: Shape, dtype: str) -> Cost:
    read = size_bytes(shape["rows"] * shape["cols"], dtype)
    kept = size_bytes(shape["rows"] * K, dtype) + size_bytes(shape["rows"] * K, "int64")
    return Cost(read_bytes=read, write_bytes=kept)  # read x, write K values and K places of each row


SOFTMAX_TOPK = Exercise(
    name="softmax_topk",
    chapter="rows",
    problem=partial(problem_of, "softmax_topk", k=K),
    cost=cost,
    arguments=("x",),
    outputs=("values", "index"),
    apart=("x",),
    sizes={"rows": (1, 8), "cols": (4, 700)},
    shown={"rows": 5, "cols": 500},
    goal=Goal(shape={"rows": 16384, "cols": 1024}, fraction=0.4, on_gpu={"rows": 65536, "cols": 1024}),
    needs=("softmax",),
)
