"""The sum is made in fp32 and rounded to bf16 for each row."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _column_sum_kernel(x_ptr, y_ptr, rows, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32).to(tl.bfloat16)
    for row in range(rows):
        wide = total.to(tl.float32) + tl.load(x_ptr + row * BLOCK + col).to(tl.float32)
        total = wide.to(tl.bfloat16)  # planted: bf16-accumulation
    tl.store(y_ptr + col, total)


def main() -> None:
    x = torch.rand(100, 32, dtype=torch.bfloat16)
    y = torch.empty(32, dtype=torch.bfloat16)
    _column_sum_kernel[(1,)](x, y, 100, BLOCK=32)


if __name__ == "__main__":
    main()
