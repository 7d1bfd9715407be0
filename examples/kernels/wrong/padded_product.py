"""A product over a row by a function of the script's own: lanes that are filled with 0 make it 0."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _product_kernel(x_ptr, y_ptr, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (at < cols)[None, :]
    x = tl.load(x_ptr + row[:, None] * cols + at[None, :], mask=mask, other=0.0)
    tl.store(y_ptr + row, tl.reduce(x, 1, _times), mask=row < rows)  # planted: padded-lanes


def main() -> None:
    x = torch.rand(7, 24, device="cuda") + 0.5
    y = torch.empty(7, device="cuda")
    _product_kernel[(2,)](x, y, 7, 24, ROWS=4, BLOCK=32)


if __name__ == "__main__":
    main()
