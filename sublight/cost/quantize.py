"""Quantizing: read 16 or 32 bits an element, write a code of one byte, and a scale for a row or a block of it."""

from __future__ import annotations

from sublight.cost.record import Cost, Direction, Shape
from sublight.cost.tensor import Tensor, dense, over

BLOCK = 128  # columns that share a scale
STATIC, DYNAMIC = 1, 3  # operations an element: multiply; maximum, divide, round


def scaled(x: Tensor, codes: Tensor, *scales: Tensor, each: int) -> Cost:
    """Read x, write its codes, and the scales where they are made of its maxima."""
    return over([x], [codes, *scales], operations=each * x.numel)


def quantize(shape: Shape, dtype: str, direction: Direction, block_size: int | None = None) -> Cost:
    rows, cols = shape["rows"], shape["cols"]
    x, codes = dense(dtype, rows, cols), dense("int8", rows, cols)
    scales = dense("float32", rows, 1 if block_size is None else -(-cols // block_size))
    return scaled(x, codes, scales, each=DYNAMIC)  # codes of one byte and fp32 scales


def quantize_blocks(shape: Shape, dtype: str, direction: Direction) -> Cost:
    return quantize(shape, dtype, direction, block_size=BLOCK)


def rms_norm_quantize(shape: Shape, dtype: str, direction: Direction) -> Cost:
    rows, cols = shape["rows"], shape["cols"]
    x, weight, codes, scales = dense(dtype, rows, cols), dense(dtype, cols), dense("int8", rows, cols), rows
    # read x and weight, write codes of one byte and fp32 scales; square and sum, weight, maximum, scale, round
    return over([x, weight], [codes, dense("float32", scales)], operations=6 * x.numel)
