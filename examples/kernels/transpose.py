"""A transpose, twice: reading columns lane by lane, and reading rows through a tile.

`sublight xray examples/kernels/transpose.py --record --gpu h100` shows what the difference is, without a GPU.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def by_columns(x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr):
    """A program writes one row of y, and so reads one column of x: neighbouring lanes are a row apart."""
    col = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + col, mask=row < rows)
    tl.store(y_ptr + col * rows + row, x, mask=row < rows)


@triton.jit
def by_tiles(x_ptr, y_ptr, rows, cols, TILE: tl.constexpr):
    """A program turns a tile on the chip: rows of x are read whole, rows of y are written whole."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    x = tl.load(x_ptr + row[:, None] * cols + col[None, :], mask=inside)
    tl.store(y_ptr + col[:, None] * rows + row[None, :], tl.trans(x), mask=tl.trans(inside))


if __name__ == "__main__":
    x = torch.randn(1024, 2048)
    y = torch.empty(2048, 1024)
    by_columns[(2048, 2)](x, y, 1024, 2048, BLOCK=512)
    by_tiles[(16, 32)](x, y, 1024, 2048, TILE=64)
