"""A tensor that is reduced over neighbouring dimensions, whatever its layout, seen as (outer, n, inner)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """A tensor as (outer, n, inner), by its strides; one of the two inner strides is 1."""

    x: torch.Tensor
    outer: int
    n: int
    inner: int
    outer_stride: int
    stride: int

    @property
    def is_rows(self) -> bool:
        return self.inner == 1 and self.stride == 1


def plane_of(x: torch.Tensor, first: int, last: int) -> Plane:
    """x reduced over its dimensions first … last; a copy only where no two strides describe the layout."""
    kept = _runs(x, [*range(first), *range(last + 1, x.dim())])
    reduced = _runs(x, [*range(first, last + 1)])
    if len(reduced) <= 1:
        n, stride = reduced[0] if reduced else (1, 1)
        if stride == 1 and len(kept) <= 1:
            rows, row_stride = kept[0] if kept else (1, n)
            return Plane(x=x, outer=rows, n=n, inner=1, outer_stride=row_stride, stride=1)
        if kept and kept[-1][1] == 1 and len(kept) <= 2:
            outer, outer_stride = kept[0] if len(kept) == 2 else (1, 0)
            return Plane(x=x, outer=outer, n=n, inner=kept[-1][0], outer_stride=outer_stride, stride=stride)
    return plane_of(x.contiguous(), first, last)


def _runs(x: torch.Tensor, dims: list[int]) -> list[tuple[int, int]]:
    """These dimensions, sizes and strides, with those made one that are one in memory."""
    runs: list[tuple[int, int]] = []
    for dim in dims:
        size, stride = x.shape[dim], x.stride(dim)
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs
