"""A matrix times a vector: a program has a few rows, walks along them in wide chunks, and sums once at the end."""

import torch
import triton
import triton.language as tl

ROWS, COLS = 8, 1024


@triton.jit
def gemv_kernel(weight_ptr, x_ptr, out_ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(0, cols, COLS):
        col = start + tl.arange(0, COLS)
        mask = (row[:, None] < rows) & (col[None, :] < cols)
        weight = tl.load(weight_ptr + row[:, None] * cols + col[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        total += weight * x[None, :]
    tl.store(out_ptr + row, tl.sum(total, axis=1), mask=row < rows)


def gemv(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = weight.shape
    gemv_kernel[(triton.cdiv(rows, ROWS),)](weight, x, out, rows, cols, ROWS=ROWS, COLS=COLS, num_warps=8)
