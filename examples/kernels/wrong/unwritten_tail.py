"""The grid is rounded down, so the tail is never written."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, 3 * tl.load(x_ptr + offsets, mask=mask), mask=mask)  # planted: unwritten-output


def main() -> None:
    x = torch.randn(1000)
    y = torch.empty(1000)
    _scale_kernel[(1000 // 128,)](x, y, 1000, BLOCK=128)
    print(y.sum())


if __name__ == "__main__":
    main()
