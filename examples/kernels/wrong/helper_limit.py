"""A helper is told the width of both halves where it reads one: found at the helper's line."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _load_row(row_ptr, col, limit):
    return tl.load(row_ptr + col, mask=col < limit, other=0.0)  # planted: out-of-bounds


@triton.jit
def _swiglu_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    gate = _load_row(x_ptr + row * 2 * cols, col, cols)
    up = _load_row(x_ptr + row * 2 * cols + cols, col, 2 * cols)
    tl.store(y_ptr + row * cols + col, gate * tl.sigmoid(gate) * up, mask=col < cols)


def main() -> None:
    x = torch.randn(3, 200, device="cuda")
    y = torch.empty(3, 100, device="cuda")
    _swiglu_kernel[(3,)](x, y, 100, BLOCK=128)


if __name__ == "__main__":
    main()
