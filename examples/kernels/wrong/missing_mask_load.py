"""Rows of 100 are read as rows of 128; the last one ends outside."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _row_sum_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + col)  # planted: out-of-bounds
    tl.store(y_ptr + row, tl.sum(tl.where(col < cols, x, 0.0), axis=0))


def main() -> None:
    x = torch.randn(5, 100)
    y = torch.empty(5)
    _row_sum_kernel[(5,)](x, y, 100, BLOCK=128)
    torch.testing.assert_close(y, x.sum(1))


if __name__ == "__main__":
    main()
