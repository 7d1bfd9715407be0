"""A row times its stride passes 2**31.

run with: --at rows=4_000_000
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _row_max_kernel(x_ptr, y_ptr, rows, cols, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        at = row * stride + col  # planted: offset-overflow
        best = tl.maximum(best, tl.load(x_ptr + at, mask=col < cols, other=float("-inf")))
    tl.store(y_ptr + row, tl.max(best, axis=0))


def main() -> None:
    x = torch.randn(7, 1000)
    y = torch.empty(7)
    _row_max_kernel[(7,)](x, y, 7, 1000, x.stride(0), BLOCK=256)
    torch.testing.assert_close(y, x.max(1).values)


if __name__ == "__main__":
    main()
