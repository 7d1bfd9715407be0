"""Programs add to one row in turn, behind a lock."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _locked_kernel(x_ptr, sum_ptr, lock_ptr, cols, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + tl.program_id(0) * cols + col, mask=mask)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    total = tl.load(sum_ptr + col, mask=mask)
    tl.store(sum_ptr + col, total + x, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def main() -> None:
    x = torch.randn(16, 60)
    total = torch.zeros(60)
    lock = torch.zeros(1, dtype=torch.int32)
    _locked_kernel[(16,)](x, total, lock, 60, BLOCK=64)
    torch.testing.assert_close(total, x.sum(0))


if __name__ == "__main__":
    main()
