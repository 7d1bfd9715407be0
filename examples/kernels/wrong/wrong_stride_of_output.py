"""A transpose that steps by the wrong side of the matrix."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _transpose_kernel(x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * cols + col, mask=mask)
    tl.store(y_ptr + col * cols + row, x, mask=mask)  # planted: out-of-bounds, unwritten-output


def main() -> None:
    x = torch.randn(24, 40)
    y = torch.empty(40, 24)
    _transpose_kernel[(2, 3)](x, y, 24, 40, BLOCK=16)
    print(y.sum())


if __name__ == "__main__":
    main()
