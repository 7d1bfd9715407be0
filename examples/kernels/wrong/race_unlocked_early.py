"""The lock is given back before the sum is stored."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_rows_kernel(x_ptr, y_ptr, lock_ptr, cols, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + tl.program_id(0) * cols + col, mask=mask, other=0.0)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    total = tl.load(y_ptr + col, mask=mask, other=0.0)  # planted: race
    tl.atomic_xchg(lock_ptr, 0)
    tl.store(y_ptr + col, total + x, mask=mask)  # planted: race


def main() -> None:
    x = torch.randn(9, 50)
    y = torch.zeros(50)
    _sum_rows_kernel[(9,)](x, y, torch.zeros(1, dtype=torch.int32), 50, BLOCK=64)


if __name__ == "__main__":
    main()
