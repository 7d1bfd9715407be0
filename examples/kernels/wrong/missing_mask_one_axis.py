"""A tile is masked along its rows, not along its columns: it runs into the next row."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _scale_kernel(x_ptr, y_ptr, rows, cols, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(x_ptr + row * cols + col, mask=(row < rows) & (col < cols), other=0.0)
    tl.store(y_ptr + row * cols + col, 2 * x, mask=row < rows)  # planted: race, out-of-bounds


def main() -> None:
    x = torch.randn(30, 40)
    y = torch.empty_like(x)
    _scale_kernel[(2, 3)](x, y, 30, 40, TILE=16)


if __name__ == "__main__":
    main()
