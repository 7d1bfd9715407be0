"""Elementwise ops: read what comes in once, write the result."""

from __future__ import annotations

from collections.abc import Iterable

from sublight.cost.record import NOTHING, Cost, Direction, Shape, in_direction
from sublight.cost.tensor import Tensor, dense, over

GATE = (9, 14)  # operations of silu(gate) * up or gelu(gate) * up, forward and backward


def elementwise(reads: Iterable[Tensor], out: Tensor, *, each: int = 1, dtype: str | None = None) -> Cost:
    """`each` operations an element of the result, done in `dtype` where that is not the result's."""
    return over(reads, [out], operations=each * out.numel, dtype=dtype or out.dtype)


def fill(out: Tensor) -> Cost:
    """Written as it lies in memory, never read: constants, and random numbers."""
    return Cost(read_bytes=0, write_bytes=out.real_bytes)


def dropout(x: Tensor, *, keeps_mask: bool) -> Cost:
    """Read x, write y and, where the backward pass wants it, a mask of one byte an element; draw, and scale."""
    mask = [Tensor(shape=x.shape, dtype="bool")] if keeps_mask else []
    return over([x], [x, *mask], operations=2 * x.numel, dtype=x.dtype)


def dropout_backward(dy: Tensor, mask: Tensor) -> Cost:
    return over([dy, mask], [dy], operations=2 * dy.numel, dtype=dy.dtype)


def gated(halves: Iterable[Tensor], out: Tensor) -> Cost:
    """Read gate and up, in one tensor or in two, write y."""
    return over(halves, [out], operations=GATE[0] * out.numel, dtype=out.dtype)


def add(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x = dense(dtype, shape["numel"])
    # read x, y, write z; both gradients are dz itself
    return in_direction(direction, elementwise([x, x], x), NOTHING)


def activation(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x = dense(dtype, shape["rows"], shape["cols"])
    # read x, write y; read dy, x, write dx
    return in_direction(direction, elementwise([x], x, each=8), elementwise([x, x], x, each=12))


def bias_gelu(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, bias = dense(dtype, shape["rows"], shape["cols"]), dense(dtype, shape["cols"])
    # read x and bias, write y; read dy, x and bias, write dx and the bias's gradient
    return in_direction(
        direction,
        over([x, bias], [x], operations=9 * x.numel),
        over([x, x, bias], [x, bias], operations=14 * x.numel),
    )


def bias_dropout_residual(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, bias = dense(dtype, shape["rows"], shape["cols"]), dense(dtype, shape["cols"])
    # read x, residual and bias, write y; read dy, write dx and the bias's gradient: the residual's is dy itself
    return in_direction(
        direction,
        over([x, x, bias], [x], operations=4 * x.numel),
        over([x], [x, bias], operations=2 * x.numel),
    )


def gated_activation(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x = dense(dtype, shape["rows"], shape["cols"])
    # read gate and up, write y; read dy, gate and up, write dgate and dup
    return in_direction(direction, gated([x, x], x), over([x, x, x], [x, x], operations=GATE[1] * x.numel, dtype=dtype))
