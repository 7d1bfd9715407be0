"""Attention, one query a program: three passes over the keys, as softmax has them on paper."""

from __future__ import annotations

from functools import partial

from sublight.learn.exercises.attention.shared import cost_of, problem
from sublight.learn.record import Exercise, Goal

NAIVE_ATTENTION = Exercise(
    name="naive_attention",
    chapter="attention",
    problem=problem,
    cost=partial(cost_of, causal=False),
    arguments=("q", "k", "v"),
    outputs=("out",),
    apart=("q", "k", "v"),
    sizes={"heads": (1, 2), "q_len": (1, 6), "kv_len": (1, 150), "head_dim": (32, 32)},
    shown={"heads": 2, "q_len": 4, "kv_len": 100, "head_dim": 32},
    goal=Goal(shape={"heads": 8, "q_len": 512, "kv_len": 512, "head_dim": 64}, fraction=0.025),
    needs=("softmax", "gemv"),
)
