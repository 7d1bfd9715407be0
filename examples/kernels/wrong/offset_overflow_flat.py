"""The program's first element is counted in 32 bits.

run with: --at n=3_000_000_000
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)  # planted: offset-overflow
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


def main() -> None:
    n = 1000
    x = torch.randn(n)
    y = torch.empty_like(x)
    _copy_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n, BLOCK=128)
    torch.testing.assert_close(y, x)


if __name__ == "__main__":
    main()
