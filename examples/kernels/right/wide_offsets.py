"""Offsets in 64 bits hold at any size.

run with: --at n=3_000_000_000
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK  # n may pass 2**31
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


def main() -> None:
    n = 1000
    x = torch.randn(n)
    y = torch.empty_like(x)
    _copy_kernel[(triton.cdiv(n, 128),)](x, y, n, BLOCK=128)
    torch.testing.assert_close(y, x)


if __name__ == "__main__":
    main()
