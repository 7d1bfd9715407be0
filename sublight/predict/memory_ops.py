"""Memory-bound ops as known models hold them: what `rows` measures, and what predictions are held against.

A model, a step, a batch and a context are drawn by chance; of the ops of that step, one is taken. So widths are those
that models have, and tokens are any number. Ops take turns, each as often as the others. Left out are those that read
rows of a table by chance (embedding, routing).
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass
from typing import Any

from sublight.cost.record import Direction, Shape
from sublight.predict import census, config, estimate
from sublight.predict.operation import Operation
from sublight.predict.step import Mode, Step

MOST_BYTES = 1 << 31  # of one run
LEAST_BYTES = 1 << 14
SMALL_BYTES, SMALL_SHARE = 4 << 20, 0.3  # of those that are hardly more than a launch, fewer are drawn
STATES = (16.0, 26.5)  # log2 of how many parameters an optimizer updates: a GPU's part of a model


@dataclass(frozen=True, slots=True)
class MemoryOp:
    """An op in one direction."""

    op: str
    direction: Direction = "fwd"


BASIC = tuple(MemoryOp(op) for op in ("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "gelu"))  # of --calibrate
OPS = (
    *BASIC,
    *(MemoryOp(op) for op in ("add_layer_norm", "rope", "qk_norm_rope")),
    *(MemoryOp(op) for op in ("adamw", "add", "transpose", "reduce_sum", "sample")),
    MemoryOp("cross_entropy", "fwd+bwd"),
    *(MemoryOp(op, "bwd") for op in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "swiglu", "gelu")),
    *(MemoryOp(op, "bwd") for op in ("rope", "qk_norm_rope")),
)

TINY = (MemoryOp("rms_norm"), MemoryOp("gelu"), MemoryOp("add_rms_norm", "bwd"))  # that run on a CPU, in tests


def power(draw: random.Random, low: float, high: float, multiple: int = 1) -> int:
    """Evenly over the logarithm, in log2, to a multiple."""
    return max(multiple, round(2 ** draw.uniform(low, high) / multiple) * multiple)


@functools.cache
def holders(each: MemoryOp) -> tuple[tuple[str, Mode], ...]:
    """Known models and their steps that have the op."""
    return tuple((name, mode) for name, mode, held in _held() if each in held)


@functools.cache
def _held() -> tuple[tuple[str, Mode, frozenset[MemoryOp]], ...]:
    found = []
    for name in config.known_names():
        model = config.load(name)
        for mode in estimate.modes_of(model):
            ops = census.census(model, Step(mode=mode, batch=2, context=16))
            found.append((name, mode, frozenset(MemoryOp(op.op, op.direction) for op in ops if op.kind == "stream")))
    return tuple(found)


def shape_of(each: MemoryOp, draw: random.Random, tiny: bool) -> dict[str, Any]:
    """One op of one step."""
    head = {"op": each.op, "direction": each.direction}
    if each.op == "adamw":
        return {**head, "tensors": 1, "numel": power(draw, *STATES)}
    while True:
        op = _drawn(each, draw, tiny)
        if LEAST_BYTES <= op.cost.bytes <= (SMALL_BYTES if tiny else MOST_BYTES) and (
            tiny or op.cost.bytes >= SMALL_BYTES or draw.random() < SMALL_SHARE
        ):
            return head | _sizes(op.op, op.shape)


def _drawn(each: MemoryOp, draw: random.Random, tiny: bool) -> Operation:
    while True:
        name, mode = draw.choice(holders(each))
        model = config.load(name)
        context = model.tokens or power(draw, 0 if tiny else 4, 5 if tiny else 13)
        step = Step(mode=mode, batch=power(draw, 0, 1 if tiny else 8), context=min(context, model.positions or context))
        if found := [op for op in census.census(model, step) if MemoryOp(op.op, op.direction) == each]:
            return draw.choice(found)  # none where one token decodes: it is inside a product


def _sizes(op: str, shape: Shape) -> dict[str, int]:
    """An op's sizes, with the keys of its own record."""
    if op == "add" and "numel" not in shape:
        return {"numel": math.prod(shape.values())}
    return {"batch": 1, **shape} if op == "transpose" else dict(shape)
