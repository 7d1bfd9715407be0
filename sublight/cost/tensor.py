"""Tensors as costs see them, a shape, a data type and maybe strides, and the cost of passing over some of them once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sublight.cost.dtypes import size_bytes, vector_limit
from sublight.cost.record import Cost

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One operand. Without strides it is dense."""

    shape: Sizes
    dtype: str
    strides: Sizes | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """If it is written whole."""
        return size_bytes(self.numel, self.dtype)

    @property
    def real_bytes(self) -> int:
        """What it takes in memory: an expanded dimension is there once, overlapping windows share their elements."""
        if self.strides is None or not self.numel:
            return self.bytes
        steps = [(size, stride) for size, stride in zip(self.shape, self.strides, strict=True) if stride]
        distinct = math.prod(size for size, _ in steps)
        span = 1 + sum((size - 1) * stride for size, stride in steps)
        return size_bytes(min(distinct, span), self.dtype)

    @property
    def is_dense(self) -> bool:
        """Row-major without gaps, as far as is known."""
        if self.strides is None:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def text(self) -> str:
        """
        >>> Tensor(shape=(4096, 1024), dtype="int8").text, Tensor(shape=(), dtype="int8").text
        ('4096x1024', '1')
        """
        return "x".join(str(size) for size in self.shape) or "1"


def dense(dtype: str, *shape: int) -> Tensor:
    return Tensor(shape=shape, dtype=dtype)


def raw(count_bytes: int) -> Tensor:
    """So many bytes of which nothing else is known."""
    return Tensor(shape=(count_bytes,), dtype="uint8")


def over(
    reads: Iterable[Tensor],
    writes: Iterable[Tensor],
    *,
    operations: float = 0,
    dtype: str = "",
    flops: Mapping[str, float] | None = None,
) -> Cost:
    """One pass: each of `reads` once as it lies in memory, each of `writes` once and whole.

    `operations` are all of them, not those of one element, outside tensor cores; they are done in `dtype`, else in the
    data type of the first tensor. `flops` has them by limit instead.
    """
    reads, writes = list(reads), list(writes)
    if operations:
        flops = {vector_limit(dtype or (reads + writes)[0].dtype): operations}
    return Cost(
        read_bytes=sum(tensor.real_bytes for tensor in reads),
        write_bytes=sum(tensor.bytes for tensor in writes),
        flops=flops or {},
    )
