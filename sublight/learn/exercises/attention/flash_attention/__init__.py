"""Flash attention: a block of queries a program, both products on the tensor cores, causal."""

from __future__ import annotations

from functools import partial
from typing import Any

from sublight.learn.exercises.attention.shared import cost_of, weighted, weights_of
from sublight.learn.exercises.attention.shared import problem as attention_problem
from sublight.learn.record import Exercise, Goal, Problem


def problem() -> Problem:
    """The result, and log Σ exp of each query's scores, which the backward pass needs."""

    def reference(q: Any, k: Any, v: Any) -> Any:
        weights, log_sum = weights_of(q, k, causal=True)
        return weighted(weights, v, q.dtype), log_sum

    return Problem(reference=reference, inputs=attention_problem(causal=True).inputs)


FLASH_ATTENTION = Exercise(
    name="flash_attention",
    chapter="attention",
    problem=problem,
    cost=partial(cost_of, causal=True),
    arguments=("q", "k", "v"),
    outputs=("out", "log_sum"),
    apart=("q", "k", "v"),
    sizes={"heads": (1, 2), "q_len": (1, 200), "head_dim": (32, 32)},
    shown={"heads": 2, "q_len": 150, "head_dim": 32},
    goal=Goal(
        shape={"heads": 16, "q_len": 1024, "head_dim": 64},
        dtype="float16",
        fraction=0.3,
        on_gpu={"heads": 16, "q_len": 4096, "head_dim": 128},
    ),
    needs=("online_attention", "matmul"),
    dtypes=("float16", "bfloat16"),
)
