"""Slow: the sum of each column. Page: `sublight learn show slow_columns`. Check: `sublight learn check`."""

import torch
import triton
import triton.language as tl

CAUSE = ""  # TODO 1: one of the page's words
ROWS = 256


@triton.jit
def slow_columns_kernel(x_ptr, out_ptr, rows, cols, ROWS: tl.constexpr):  # TODO 2: mend it
    col = tl.program_id(0)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        total += tl.load(x_ptr + row * cols + col, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + col, tl.sum(total, axis=0))


def slow_columns(x: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = x.shape
    slow_columns_kernel[(cols,)](x, out, rows, cols, ROWS=ROWS)
