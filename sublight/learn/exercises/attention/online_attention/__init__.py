"""Attention in one pass over keys and values: the recurrence of online softmax, with the result carried along."""

from __future__ import annotations

from functools import partial

from sublight.learn.exercises.attention.shared import cost_of, problem
from sublight.learn.record import Exercise, Goal

ONLINE_ATTENTION = Exercise(
    name="online_attention",
    chapter="attention",
    problem=problem,
    cost=partial(cost_of, causal=False),
    arguments=("q", "k", "v"),
    outputs=("out",),
    apart=("q", "k", "v"),
    sizes={"heads": (1, 2), "q_len": (1, 6), "kv_len": (1, 150), "head_dim": (32, 32)},
    shown={"heads": 2, "q_len": 4, "kv_len": 100, "head_dim": 32},
    goal=Goal(shape={"heads": 8, "q_len": 512, "kv_len": 512, "head_dim": 64}, fraction=0.05),
    needs=("naive_attention", "online_softmax", "online_by_hand"),
)
