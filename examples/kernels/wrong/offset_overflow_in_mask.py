"""Offsets are wide, but the product that bounds them is not: the mask is wrong.

run with: --at rows=70_000
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr):
    n = rows * cols  # planted: offset-overflow
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask, other=0), mask=mask)


def main() -> None:
    x = torch.zeros(8, 40_000, dtype=torch.int8)
    y = torch.empty_like(x)
    _copy_kernel[(triton.cdiv(x.numel(), 16384),)](x, y, 8, 40_000, BLOCK=16384)


if __name__ == "__main__":
    main()
