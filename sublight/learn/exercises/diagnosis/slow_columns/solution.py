"""The sum of each column: a program has neighbouring columns, so that a warp reads along a row."""

import torch
import triton
import triton.language as tl

CAUSE = "strided"
ROWS, COLS = 32, 32


@triton.jit
def slow_columns_kernel(x_ptr, out_ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & (col[None, :] < cols)
        total += tl.load(x_ptr + row[:, None] * cols + col[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + col, tl.sum(total, axis=0), mask=col < cols)


def slow_columns(x: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = x.shape
    slow_columns_kernel[(triton.cdiv(cols, COLS),)](x, out, rows, cols, ROWS=ROWS, COLS=COLS)
