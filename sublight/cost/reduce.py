"""Reductions, scans and pools: the input is read once, and what is left of it is written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sublight.cost.record import NOTHING, Cost, Direction, Shape, in_direction
from sublight.cost.tensor import Sizes, Tensor, dense, over, raw


def reduction(x: Tensor, results: Sequence[Tensor], *, each: int = 1) -> Cost:
    """Read x, write the results; `each` operations an element of x."""
    return over([x], results, operations=each * x.numel)


def scan(x: Tensor, *results: Tensor) -> Cost:
    """Read x, write as much: each element is added within its block, and its block's start to it."""
    return over([x], results, operations=2 * x.numel)


def pool_size(size: int, window: int, stride: int, padding: int, dilation: int, *, ceil: bool) -> int:
    """How many windows fit into a dimension.

    >>> pool_size(224, 3, 2, 1, 1, ceil=False), pool_size(7, 2, 2, 0, 1, ceil=True)
    (112, 4)
    """
    reach = size + 2 * padding - dilation * (window - 1) - 1
    steps = -(-reach // stride) if ceil else reach // stride
    if ceil and steps * stride >= size + padding:
        steps -= 1  # a window must not start beyond the padding
    return steps + 1


def pool(x: Tensor, out: Sizes, window: int, *, indices: bool) -> Cost:
    """Read what the windows touch, write one element each, and where it was if the backward pass wants that.

    `window` is its number of elements; one operation for each of them.
    """
    y = Tensor(shape=out, dtype=x.dtype)
    taps = y.numel * window
    touched = raw(min(Tensor(shape=(taps,), dtype=x.dtype).bytes, x.real_bytes))
    places = [Tensor(shape=out, dtype="int64")] if indices else []
    return over([touched], [y, *places], operations=taps, dtype=x.dtype)


def pool_backward(dy: Tensor, x: Tensor, *indices: Tensor) -> Cost:
    """Read dy and where each maximum was, write dx whole."""
    return over([dy, *indices], [x], operations=dy.numel, dtype=x.dtype)


def resized(x: Tensor, out: Sizes) -> Cost:
    """Read x (shrinking may skip elements), write the resized image; one operation an element at least."""
    y = Tensor(shape=out, dtype=x.dtype)
    return over([raw(min(x.real_bytes, y.bytes))], [y], operations=y.numel, dtype=x.dtype)


def resized_backward(dy: Tensor, out: Sizes) -> Cost:
    return over([dy], [Tensor(shape=out, dtype=dy.dtype)], operations=dy.numel)


def reduce_sum(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, left = _operands(shape, dtype)
    # read x, write the sums; the gradient is a view of dy
    return in_direction(direction, reduction(x, [left]), NOTHING)


def reduce_max(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, left = _operands(shape, dtype)
    # read x, write the maxima; read dy and where they were, write dx
    return in_direction(direction, reduction(x, [left]), over([left, dense("int64", *left.shape)], [x]))


def reduce_argmax(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x, left = _operands(shape, dtype)
    return reduction(x, [dense("int64", *left.shape)])  # read x, write where the maxima are


def cumsum(shape: Shape, dtype: str, direction: Direction) -> Cost:
    x = dense(dtype, shape["rows"], shape["cols"])
    return in_direction(direction, scan(x, x), scan(x, x))  # read x, write y; the same from the other end


def _operands(shape: Shape, dtype: str) -> tuple[Tensor, Tensor]:
    left = (shape["outer"], shape["inner"])
    return dense(dtype, math.prod(left) * shape["n"]), dense(dtype, *left)
