"""A loop over all elements ends at a product that wraps.

run with: --at rows=70_000
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _total_kernel(x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows * cols, BLOCK):  # planted: offset-overflow
        total += tl.load(x_ptr + start + tl.arange(0, BLOCK)).to(tl.int32)
    tl.store(y_ptr, tl.sum(total, axis=0))


def main() -> None:
    x = torch.ones(8, 32_768, dtype=torch.int8)
    y = torch.empty(1, dtype=torch.int32)
    _total_kernel[(1,)](x, y, 8, 32_768, BLOCK=16384)
    assert y.item() == x.numel()


if __name__ == "__main__":
    main()
