"""Rotary position embedding: read q, k and the tables, write q and k."""

from __future__ import annotations

from collections.abc import Sequence

from sublight.cost.record import Cost, Direction, Shape, in_direction
from sublight.cost.tensor import Tensor, dense, over

TURN = 3  # operations an element: two products and a sum
NORMED_TURN = (7, 14)  # with the heads' RMSNorm before it, forward and backward


def turned(heads: Sequence[Tensor], tables: Sequence[Tensor]) -> Cost:
    """Read q, k and the tables (or the positions alone, where tables are shared), write q and k."""
    return over([*heads, *tables], heads, operations=TURN * sum(head.numel for head in heads), dtype=heads[0].dtype)


def rope(shape: Shape, dtype: str, direction: Direction) -> Cost:
    q, k, tables, _ = _operands(shape, dtype)
    return in_direction(direction, turned([q, k], tables), turned([q, k], tables))  # the gradient is turned back


def qk_norm_rope(shape: Shape, dtype: str, direction: Direction) -> Cost:
    q, k, tables, weights = _operands(shape, dtype)
    n = q.numel + k.numel
    # read q, k, tables, weights, write q and k; read both gradients too, write those of q, k and the weights
    return in_direction(
        direction,
        over([q, k, *tables, *weights], [q, k], operations=NORMED_TURN[0] * n),
        over([q, k, q, k, *tables, *weights], [q, k, *weights], operations=NORMED_TURN[1] * n),
    )


def _operands(shape: Shape, dtype: str) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """q, k, the tables of cosines and sines (half as wide as a head), and the norm's weights."""
    tokens, head_dim = shape["batch"] * shape["q_len"], shape["head_dim"]
    q, k = (dense(dtype, tokens, shape[heads], head_dim) for heads in ("heads", "kv_heads"))
    table, weight = dense(dtype, shape["q_len"] * head_dim // 2), dense(dtype, head_dim)
    return q, k, (table, table), (weight, weight)
