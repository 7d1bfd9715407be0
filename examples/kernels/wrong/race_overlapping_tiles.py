"""Tiles of 128 that start every 120 elements store sums of their own tile where they overlap."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _centre_kernel(x_ptr, y_ptr, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=float("-inf"))
    tl.store(y_ptr + offsets, x - tl.max(x, axis=0), mask=mask)  # planted: race


def main() -> None:
    x = torch.randn(480)
    y = torch.empty_like(x)
    _centre_kernel[(4,)](x, y, 480, STEP=120, BLOCK=128)
    print(y.sum())


if __name__ == "__main__":
    main()
