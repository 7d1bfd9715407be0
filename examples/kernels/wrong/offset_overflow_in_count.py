"""Offsets are 64 bits wide, but the number of elements that ends them is a product of two int32 sizes."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


# run with: --at rows=100_000
@triton.jit
def _copy_kernel(x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr):
    count = rows * cols  # planted: offset-overflow
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < count), mask=at < count)


def main() -> None:
    x = torch.randn(10, 50_000, device="cuda")
    _copy_kernel[(triton.cdiv(x.numel(), 1024),)](x, torch.empty_like(x), 10, 50_000, BLOCK=1024)


if __name__ == "__main__":
    main()
