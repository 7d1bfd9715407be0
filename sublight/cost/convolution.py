"""Convolutions: every output element takes channels/groups · taps multiply-adds; each tensor is moved once."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sublight.cost.dtypes import matmul_limit
from sublight.cost.record import Cost, Direction, Shape, in_direction
from sublight.cost.tensor import Sizes, Tensor, dense, over


def output_sizes(sizes: Sizes, taps: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Sizes:
    """
    >>> output_sizes((224, 224), (7, 7), (2, 2), (3, 3), (1, 1))
    (112, 112)
    """
    every = zip(sizes, taps, stride, padding, dilation, strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 if s > 0 else -1 for n, k, s, p, d in every)


def transposed_sizes(sizes: Sizes, taps: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, more: Sizes) -> Sizes:
    """The output's sizes of a transposed convolution; `more` is its output_padding.

    >>> transposed_sizes((7, 7), (4, 4), (2, 2), (1, 1), (1, 1), (0, 0))
    (14, 14)
    """
    every = zip(sizes, taps, stride, padding, dilation, more, strict=True)
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + o for n, k, s, p, d, o in every)


def operations(meets: int, weight: Sizes) -> float:
    """Each element of the output (of a transposed one: of the input) meets the taps of its group's channels."""
    return 2.0 * meets * math.prod(weight[1:])


def forward(x: Tensor, weight: Tensor, out: Tensor, *more: Tensor, flops: Mapping[str, float]) -> Cost:
    """Read x, weight (bias, addend), write the output."""
    return over([x, weight, *more], [out], flops=flops)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, *, dx: bool, dw: bool, bias: Tensor | None, flops: Mapping[str, float]
) -> Cost:
    """The gradients of x and of the weight each take the forward's operations; the bias's is a sum over dy."""
    reads = [dy, *([weight] if dx else []), *([x] if dw else [])]
    writes = [*([x] if dx else []), *([weight] if dw else []), *([bias] if bias else [])]
    return over(reads, writes, flops=flops)


def conv2d(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """Square images and taps: batch, in_channels, out_channels, size, taps, stride, padding (and groups)."""
    groups, size, taps = shape.get("groups", 1), (shape["size"],) * 2, (shape["taps"],) * 2
    stride, padding = (shape.get("stride", 1),) * 2, (shape.get("padding", 0),) * 2
    x = dense(dtype, shape["batch"], shape["in_channels"], *size)
    weight = dense(dtype, shape["out_channels"], shape["in_channels"] // groups, *taps)
    sizes = output_sizes(size, taps, stride, padding, (1, 1))
    y = dense(dtype, shape["batch"], shape["out_channels"], *sizes)
    once = operations(y.numel, weight.shape)
    limit = matmul_limit(dtype)
    return in_direction(
        direction,
        forward(x, weight, y, flops={limit: once}),
        backward(y, x, weight, dx=True, dw=True, bias=None, flops={limit: 2 * once}),
    )
