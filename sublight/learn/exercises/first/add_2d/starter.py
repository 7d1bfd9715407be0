"""out = x + y for matrices. Read the page: `sublight learn show add_2d`. Check: `sublight learn check add_2d`."""

import torch
import triton
import triton.language as tl

ROWS, COLS = 8, 128  # the tile of one program


@triton.jit
def add_2d_kernel(x_ptr, y_ptr, out_ptr, rows, cols, x_stride, y_stride, out_stride,
                  ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    place = row[:, None] * cols + col[None, :]  # TODO 1: the rows of x do not follow one another in memory
    mask = col[None, :] < cols  # TODO 2: rows have an end, too
    x = tl.load(x_ptr + place, mask=mask)
    y = tl.load(y_ptr + place, mask=mask)
    tl.store(out_ptr + place, x + y, mask=mask)


def add_2d(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    rows, cols = out.shape
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(cols, COLS))
    add_2d_kernel[grid](x, y, out, rows, cols, x.stride(0), y.stride(0), out.stride(0), ROWS=ROWS, COLS=COLS)
