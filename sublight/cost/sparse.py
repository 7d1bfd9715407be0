"""Weights with two zeros in every four: half of the values, and four bits that say which."""

from __future__ import annotations

from sublight.cost.record import Cost, Direction, Shape
from sublight.cost.tensor import Tensor, dense, over


def packed(dtype: str, rows: int, cols: int) -> list[Tensor]:
    """The values that are left, and an int16 for every sixteen columns: of 16-bit weights 9/16 of the dense bytes.

    >>> sum(x.bytes for x in packed("bfloat16", 64, 64)) / dense("bfloat16", 64, 64).bytes
    0.5625
    """
    return [dense(dtype, rows, cols // 2), dense("int16", rows, -(-cols // 16))]


def sparsify_24(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """Read the weight, write it packed; with `both` its transpose as well: together 9/8 of a 16-bit weight's bytes.

    The choice in every four compares each with each, and of every 4x4 weighs the 90 patterns that fit both ways.
    """
    rows, cols = shape["rows"], shape["cols"]
    results = packed(dtype, rows, cols) + (packed(dtype, cols, rows) if shape["both"] else [])
    return over([dense(dtype, rows, cols)], results, operations=4.0 * rows * cols, dtype="float32")
