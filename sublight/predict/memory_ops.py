"""Ops that move bytes, as models hold them, and the shapes that are measured: from one token to half a gigabyte.

Sizes are drawn evenly over their logarithms. One row in six has a length that 16 does not divide, as vocabularies have:
Triton then loads element by element.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sublight.cost.record import Direction

Sizes = dict[str, int]
SMALLEST, LARGEST = 12, 27  # log2 of an op's elements
ODD = 1 / 6
VOCABULARIES = (30522, 32000, 50257, 50304, 100277, 128256, 151936)


@dataclass(frozen=True, slots=True)
class MemoryOp:
    """An op in one direction, and how its shapes are drawn."""

    op: str
    direction: Direction
    shape: Callable[[random.Random, bool], Sizes]


def power(draw: random.Random, low: float, high: float, multiple: int = 1) -> int:
    """Evenly over the logarithm, in log2, to a multiple."""
    return max(multiple, round(2 ** draw.uniform(low, high) / multiple) * multiple)


def elements(draw: random.Random, tiny: bool) -> float:
    """log2 of how many an op has."""
    return draw.uniform(SMALLEST, SMALLEST + 2 if tiny else LARGEST)


def rows(draw: random.Random, tiny: bool) -> Sizes:
    """Tokens of a model's width."""
    is_odd = draw.random() < ODD
    cols = power(draw, 6, 9 if tiny else 14, 1 if is_odd else 64)
    return {"rows": max(1, round(2 ** elements(draw, tiny) / cols)), "cols": cols}


def logits(draw: random.Random, tiny: bool) -> Sizes:
    """Rows of a vocabulary's length."""
    cols = draw.choice(VOCABULARIES) if draw.random() < 0.5 else power(draw, 13, 17.5, 64)
    return {"rows": max(1, round(2 ** elements(draw, tiny) / cols)), "cols": 512 if tiny else cols}


def rows_or_logits(draw: random.Random, tiny: bool) -> Sizes:
    return (logits if draw.random() < 0.25 else rows)(draw, tiny)


def sampled(draw: random.Random, tiny: bool) -> Sizes:
    found = logits(draw, tiny)
    return {"rows": min(found["rows"], 1024), "vocab": found["cols"]}


def flat(draw: random.Random, tiny: bool) -> Sizes:
    return {"numel": round(2 ** elements(draw, tiny))}


def states(draw: random.Random, tiny: bool) -> Sizes:
    return {"tensors": 1, **flat(draw, tiny)}


def heads(draw: random.Random, tiny: bool) -> Sizes:
    kv_heads, head_dim = draw.choice((1, 2, 4, 8, 16, 32)), draw.choice((64, 128))
    heads = kv_heads * draw.choice((1, 2, 4, 8))
    tokens = max(1, round(2 ** elements(draw, tiny) / (heads * head_dim)))
    batch = min(tokens, power(draw, 0, math.log2(256)))
    return {
        "batch": batch,
        "q_len": max(1, tokens // batch),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }


def column_sums(draw: random.Random, tiny: bool) -> Sizes:
    """A bias's gradient: the sum over all tokens."""
    width = power(draw, 7, 9 if tiny else 14, 64)
    return {"outer": 1, "n": max(1, round(2 ** elements(draw, tiny) / width)), "inner": width}


def matrices(draw: random.Random, tiny: bool) -> Sizes:
    return {"batch": 1, **rows(draw, tiny)}


BASIC = (
    *(MemoryOp(op, "fwd", rows) for op in ("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "gelu")),
    MemoryOp("softmax", "fwd", rows_or_logits),
)  # what --calibrate measures
OPS = (
    *BASIC,
    *(MemoryOp(op, "bwd", rows) for op in ("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "gelu")),
    MemoryOp("softmax", "bwd", rows_or_logits),
    *(MemoryOp("add_layer_norm", direction, rows) for direction in ("fwd", "bwd")),
    *(MemoryOp(op, direction, heads) for op in ("rope", "qk_norm_rope") for direction in ("fwd", "bwd")),
    *(MemoryOp("cross_entropy", direction, logits) for direction in ("fwd", "fwd+bwd")),
    MemoryOp("adamw", "fwd", states),
    MemoryOp("add", "fwd", flat),
    MemoryOp("transpose", "fwd", matrices),
    MemoryOp("reduce_sum", "fwd", column_sums),
    MemoryOp("sample", "fwd", sampled),
)


def shape_of(each: MemoryOp, draw: random.Random, tiny: bool) -> dict[str, Any]:
    return {"op": each.op, "direction": each.direction, **each.shape(draw, tiny)}
