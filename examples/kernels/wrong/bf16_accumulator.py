"""A sum over a loop is kept in bf16, and stops growing."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_rows_kernel(x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    mask = col < cols
    total = tl.zeros((BLOCK,), dtype=tl.bfloat16)
    for row in range(rows):
        total += tl.load(x_ptr + row * cols + col, mask=mask, other=0.0)  # planted: bf16-accumulation
    tl.store(y_ptr + col, total, mask=mask)


def main() -> None:
    x = torch.ones(600, 32, dtype=torch.bfloat16)
    y = torch.empty(32, dtype=torch.bfloat16)
    _sum_rows_kernel[(1,)](x, y, 600, 32, BLOCK=32)
    assert y[0].item() == 256  # where it stops, as on a GPU; the sum is 600


if __name__ == "__main__":
    main()
