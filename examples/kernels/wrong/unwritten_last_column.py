"""A mask that is one too narrow; nobody reads the result here."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _relu_rows_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + col, mask=col < cols)
    tl.store(y_ptr + row * cols + col, tl.maximum(x, 0.0), mask=col < cols - 1)  # planted: unwritten-output


def main() -> None:
    x = torch.randn(6, 50)
    y = torch.empty_like(x)
    _relu_rows_kernel[(6,)](x, y, 50, BLOCK=64)


if __name__ == "__main__":
    main()
