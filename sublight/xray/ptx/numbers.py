"""PTX types as numpy: registers hold bits (unsigned integers), and an instruction reads and writes them as numbers.

16-bit floats are computed in fp32 and rounded once; an fp32 product and sum in float64. Flushing of subnormal numbers
(.ftz) is left out, and functions that the hardware approximates are computed well: no address hangs on a last bit.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
BITS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
SIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.int8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}
FLOAT: dict[int, np.dtype[Any]] = {2: np.dtype(np.float16), 4: np.dtype(np.float32), 8: np.dtype(np.float64)}
_TYPE = re.compile(r"(bf|[busf])(\d+)(x2)?$")


class Kind:
    """One PTX type: u32, s64, b16, f32, bf16x2, pred."""

    __slots__ = ("bytes", "family", "item_bytes", "name", "pair")

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "pred":
            self.family, self.item_bytes, self.pair = "pred", 1, False
        else:
            match = _TYPE.match(name)
            if not match or int(match[2]) not in (8, 16, 32, 64):
                raise ValueError(name)
            self.family, self.item_bytes, self.pair = match[1], int(match[2]) // 8, bool(match[3])
        self.bytes = self.item_bytes * (2 if self.pair else 1)

    @property
    def is_float(self) -> bool:
        return self.family in ("f", "bf")

    def numbers(self, bits: Array) -> Array:
        """Bits of the type's own width -> what numpy computes with; a pair gets a last axis of two."""
        if self.family == "pred":
            return bits
        if self.pair:
            bits = np.ascontiguousarray(bits).view(BITS[self.item_bytes]).reshape(-1, 2)
        if self.family == "s":
            return bits.view(SIGNED[self.item_bytes])
        if self.family == "bf":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if self.family == "f":
            numbers = bits.view(FLOAT[self.item_bytes])
            return numbers.astype(np.float32) if self.item_bytes == 2 else numbers
        return bits

    def bits(self, numbers: Array) -> Array:
        """The way back, rounded to nearest even."""
        if self.family == "pred":
            return numbers.astype(np.bool_, copy=False)
        if self.family == "bf":
            bits = rounded_to_bf16(numbers.astype(np.float32, copy=False))
        elif self.family == "f":
            bits = numbers.astype(FLOAT[self.item_bytes], copy=False).view(BITS[self.item_bytes])
        elif numbers.dtype == np.bool_:
            bits = numbers.astype(BITS[self.item_bytes])
        else:
            width = numbers.dtype.itemsize
            bits = numbers.view(BITS[width])
            if width != self.item_bytes:
                bits = bits.astype(BITS[self.item_bytes])
        if self.pair:
            bits = np.ascontiguousarray(bits).view(BITS[self.bytes]).reshape(-1)
        return bits


def distinct(numbers: Array) -> Array:
    """Sorted, each once; numpy's own is ten times slower at a few thousand integers.

    >>> distinct(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    numbers = np.sort(numbers)
    fresh = np.ones(len(numbers), np.bool_)
    fresh[1:] = numbers[1:] != numbers[:-1]
    return numbers[fresh]


def rounded_to_bf16(numbers: Array) -> Array:
    """
    >>> [hex(x) for x in rounded_to_bf16(np.array([1.0, 1.00390625, np.nan], np.float32))]
    ['0x3f80', '0x3f80', '0x7fff']
    """
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    high = bits >> np.uint32(16)
    rounded = ((bits + (np.uint32(0x7FFF) + (high & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(numbers)
    return np.where(nan, np.uint16(0x7FFF), rounded) if nan.any() else rounded


def immediate(text: str, kind: Kind) -> Array:
    """A constant's bits in that type, one lane wide.

    >>> int(immediate("-1", Kind("s32"))[0]), hex(immediate("0f3F800000", Kind("f32"))[0])
    (4294967295, '0x3f800000')
    """
    width = kind.bytes
    if kind.family == "pred":
        return np.array([text not in ("0", "false")])
    if text[:2] in ("0f", "0F", "0d", "0D"):
        value = int(text[2:], 16)
    elif re.fullmatch(r"-?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?", text) and not re.fullmatch(r"-?\d+", text):
        return np.array([float(text)], FLOAT[width]).view(BITS[width])
    else:
        word = text.rstrip("U")
        octal = re.fullmatch(r"(-?)0([0-7]+)", word)
        value = int(octal[1] + octal[2], 8) if octal else int(word, 0)
    return np.array([value & ((1 << (8 * width)) - 1)], np.uint64).astype(BITS[width])
