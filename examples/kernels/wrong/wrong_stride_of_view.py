"""The rows of a view are taken to follow one another."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_rows_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + col, mask=col < cols)  # planted: out-of-bounds
    tl.store(y_ptr + row * cols + col, x, mask=col < cols)


def main() -> None:
    wide = torch.randn(8, 32)
    x = wide[:, :20]
    y = torch.empty(8, 20)
    _copy_rows_kernel[(8,)](x, y, 20, BLOCK=32)
    print(y.sum())


if __name__ == "__main__":
    main()
