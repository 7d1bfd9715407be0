"""A product as kernels see it: sizes, strides, and whether Hopper's copy engine can read its operands as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sublight.backend.launch import View

ENGINE_BYTES = 16  # rows must begin at multiples of it


class Product(NamedTuple):
    """C (m, n) = A (m, k) @ B (k, n), or a batch of them."""

    m: int
    n: int
    k: int
    am: int  # elements from one row of A to the next
    ak: int
    bk: int
    bn: int
    batches: int = 1
    batch_a: int = 0
    batch_b: int = 0


def product_of(a: torch.Tensor, b: torch.Tensor) -> Product | None:
    """The sizes and strides of a @ b; None where leading dimensions do not come down to one: they are copied then.

    >>> product_of(torch.empty(2, 3, 8), torch.empty(16, 8).T)
    Product(m=6, n=16, k=8, am=8, ak=1, bk=1, bn=8, batches=1, batch_a=0, batch_b=0)
    """
    k, n = b.shape[-2:]
    if b.dim() == 2:  # rows of all leading dimensions are rows of one matrix
        rows, apart = _one_stride(a.shape[:-1], a.stride()[:-1])
        return None if apart is None else Product(rows, n, k, apart, a.stride(-1), b.stride(0), b.stride(1))
    batches, batch_a = _one_stride(a.shape[:-2], a.stride()[:-2])
    _, batch_b = _one_stride(b.shape[:-2], b.stride()[:-2])
    if batch_a is None or batch_b is None:
        return None
    (am, ak), (bk, bn) = a.stride()[-2:], b.stride()[-2:]
    return Product(a.shape[-2], n, k, am, ak, bk, bn, batches, batch_a, batch_b)


def _one_stride(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int | None]:
    """How many entries these dimensions have, and the one stride from each to the next; None where there is none."""
    count, apart = 1, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if count == 1:
            apart = stride
        elif stride != count * apart:
            return 0, None
        count *= size
    return count, apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A matrix of `rows` x k in memory: A, or B with its columns for rows."""

    name: str
    rows: int
    k: int
    row_stride: int
    k_stride: int
    itemsize: int
    is_aligned: bool  # its first element lies at a multiple of 16 bytes

    @property
    def is_turned(self) -> bool:
        """k is the dimension whose entries are apart."""
        return self.k_stride != 1 and self.k > 1 and (self.row_stride == 1 or self.rows == 1)

    @property
    def is_whole(self) -> bool:
        """One of its dimensions lies in one piece."""
        return self.is_turned or self.k_stride == 1 or self.k == 1

    @property
    def inner(self) -> int:
        return self.rows if self.is_turned else self.k

    @property
    def outer(self) -> int:
        return self.k if self.is_turned else self.rows

    @property
    def apart(self) -> int:
        """Elements from one piece to the next; of a single piece, any number that will do."""
        per_row = ENGINE_BYTES // self.itemsize
        stride = self.k_stride if self.is_turned else self.row_stride
        return stride if self.outer > 1 else -(-self.inner // per_row) * per_row

    @property
    def is_readable(self) -> bool:
        """By the copy engine, as it lies."""
        return self.is_whole and self.is_aligned and self.apart > 0 and self.apart * self.itemsize % ENGINE_BYTES == 0

    def aligned(self) -> Operand:
        """Its copy: pieces that begin at multiples of 16 bytes."""
        per_row = ENGINE_BYTES // self.itemsize
        apart = -(-self.inner // per_row) * per_row
        strides = (1, apart) if self.is_turned else (apart, 1)
        return Operand(
            name=f"{self.name}_aligned",
            rows=self.rows,
            k=self.k,
            row_stride=strides[0],
            k_stride=strides[1],
            itemsize=self.itemsize,
            is_aligned=True,
        )

    def view(self, block_rows: int, block_k: int) -> View:
        block = (block_k, block_rows) if self.is_turned else (block_rows, block_k)
        return View((self.outer, self.inner), (self.apart, 1), block)


def operands_of(p: Product, a: torch.Tensor, b: torch.Tensor) -> tuple[Operand, Operand]:
    """A, and B by its columns."""
    itemsize = a.element_size()
    return (
        Operand(
            name="a", rows=p.m, k=p.k, row_stride=p.am, k_stride=p.ak, itemsize=itemsize,
            is_aligned=a.data_ptr() % ENGINE_BYTES == 0,
        ),
        Operand(
            name="b", rows=p.n, k=p.k, row_stride=p.bn, k_stride=p.bk, itemsize=itemsize,
            is_aligned=b.data_ptr() % ENGINE_BYTES == 0,
        ),
    )  # fmt: skip
