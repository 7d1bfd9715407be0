"""Counting with integer atomics: any order gives the same."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _histogram_kernel(x_ptr, bins_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.atomic_add(bins_ptr + x, 1, mask=mask)


def main() -> None:
    x = torch.randint(0, 10, (1000,))
    bins = torch.zeros(10, dtype=torch.int32)
    _histogram_kernel[(8,)](x, bins, 1000, BLOCK=128)
    assert bins.tolist() == torch.bincount(x, minlength=10).tolist()


if __name__ == "__main__":
    main()
