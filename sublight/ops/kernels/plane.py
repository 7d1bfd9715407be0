"""A tensor that is reduced over neighbouring dimensions, whatever its layout, seen as (outer, n, inner)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """A tensor as (outer, n, inner), by its strides; one of the two inner strides is 1."""

    outer: int
    n: int
    inner: int
    outer_stride: int
    stride: int
    itemsize: int
    is_aligned: bool  # the first element lies at a 16-byte boundary
    is_copy: bool = False  # the tensor has no such layout, and is copied into one piece first

    @property
    def is_rows(self) -> bool:
        return self.inner == 1 and self.stride == 1


def plane_of(x: torch.Tensor, first: int, last: int) -> Plane:
    """x reduced over its dimensions first … last; a copy only where no two strides describe the layout.

    >>> x = torch.empty(4, 5, 6)
    >>> plane_of(x, 1, 1).inner, plane_of(x.mT, 1, 1).is_rows, plane_of(x.permute(2, 0, 1), 1, 1).is_copy
    (6, True, True)
    """
    sizes, is_copy = _sizes(x.shape, x.stride(), first, last), False
    if sizes is None:
        sizes, is_copy = _sizes(x.shape, _packed(x.shape), first, last), True
    assert sizes is not None  # in a tensor of one piece, neighbouring dimensions are one
    outer, n, inner, outer_stride, stride = sizes
    return Plane(
        outer=outer,
        n=n,
        inner=inner,
        outer_stride=outer_stride,
        stride=stride,
        itemsize=x.element_size(),
        is_aligned=is_copy or x.data_ptr() % 16 == 0,
        is_copy=is_copy,
    )


def _sizes(
    shape: Sequence[int], strides: Sequence[int], first: int, last: int
) -> tuple[int, int, int, int, int] | None:
    """outer, n, inner, and the strides of outer and n; None where the layout has no such two."""
    kept = _runs(shape, strides, [*range(first), *range(last + 1, len(shape))])
    reduced = _runs(shape, strides, [*range(first, last + 1)])
    if len(reduced) > 1:
        return None
    n, stride = reduced[0] if reduced else (1, 1)
    if stride == 1 and len(kept) <= 1:
        rows, row_stride = kept[0] if kept else (1, n)
        return rows, n, 1, row_stride, 1
    if kept and kept[-1][1] == 1 and len(kept) <= 2:
        outer, outer_stride = kept[0] if len(kept) == 2 else (1, 0)
        return outer, n, kept[-1][0], outer_stride, stride
    return None


def _packed(shape: Sequence[int]) -> list[int]:
    """The strides of a tensor in one piece."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


def _runs(shape: Sequence[int], strides: Sequence[int], dims: list[int]) -> list[tuple[int, int]]:
    """These dimensions, sizes and strides, with those made one that are one in memory."""
    runs: list[tuple[int, int]] = []
    for dim in dims:
        size, stride = shape[dim], strides[dim]
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs
