"""One store names an address twice."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _scatter_kernel(x_ptr, index_ptr, y_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    mask = lane < n
    index = tl.load(index_ptr + lane, mask=mask)
    tl.store(y_ptr + index, tl.load(x_ptr + lane, mask=mask), mask=mask)  # planted: race


def main() -> None:
    x = torch.arange(64, dtype=torch.float32)
    index = torch.arange(64, device="cuda") // 2
    y = torch.zeros(32)
    _scatter_kernel[(1,)](x, index, y, 64, BLOCK=64)
    print(y.sum())


if __name__ == "__main__":
    main()
