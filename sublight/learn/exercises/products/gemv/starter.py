"""A matrix times a vector. Read the page: `sublight learn show gemv`. Check your work: `sublight learn check gemv`."""

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
        x = tl.load(x_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        # TODO 1: load the ROWS by COLS block of weight
        # TODO 2: add its products with x to total
    # TODO 3: sum along the columns, once, and store


def gemv(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = weight.shape
    gemv_kernel[(triton.cdiv(rows, ROWS),)](weight, x, out, rows, cols, ROWS=ROWS, COLS=COLS, num_warps=8)
