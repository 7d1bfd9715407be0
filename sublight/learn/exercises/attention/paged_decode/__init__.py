"""Decoding from a paged cache: one query a sequence, and a table that says where its keys and values lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.learn.record import Exercise, Goal, problem_of

PAGE = 16


def of_op(shape: Shape) -> Shape:
    """Ragged lengths, and as many heads of keys as of queries."""
    return {
        "batch": shape["batch"], "heads": shape["heads"], "kv_heads": shape["heads"], "q_len": 1,
        "kv_len": shape["kv_len"], "head_dim": shape["head_dim"], "page": PAGE, "ragged": 1,
    }  # fmt: skip


def _of_sizes(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Where there are no data, no table says what to gather: sizes and types alone."""

    def call(q: Any, *cache: Any) -> Any:
        return q.new_empty(q.shape) if q.is_meta else reference(q, *cache)

    return call


def cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("paged_attention")(of_op(shape), dtype, "fwd")


PAGED_DECODE = Exercise(
    name="paged_decode",
    chapter="attention",
    problem=partial(problem_of, "paged_attention", shape_of=of_op, around=_of_sizes),
    cost=cost,
    arguments=("q", "k_cache", "v_cache", "table", "lengths"),
    outputs=("out",),
    apart=("q", "table", "lengths"),
    sizes={"batch": (1, 4), "heads": (1, 3), "kv_len": (1, 150), "head_dim": (32, 32)},
    shown={"batch": 3, "heads": 2, "kv_len": 100, "head_dim": 32},
    goal=Goal(
        shape={"batch": 32, "heads": 8, "kv_len": 1024, "head_dim": 64},
        dtype="float16",
        fraction=0.4,
        on_gpu={"batch": 128, "heads": 8, "kv_len": 4096, "head_dim": 64},
    ),
    needs=("online_attention", "permute_rows"),
    dtypes=("float32", "float16"),
)
