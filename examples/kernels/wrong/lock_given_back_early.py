"""The lock is given back when one thread is done; the other warps' stores may come after it."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _locked_kernel(x_ptr, sum_ptr, lock_ptr, COLS: tl.constexpr):
    col = tl.arange(0, COLS)
    x = tl.load(x_ptr + tl.program_id(0) * COLS + col)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(sum_ptr + col, tl.load(sum_ptr + col) + x)
    tl.atomic_xchg(lock_ptr, 0)  # planted: missing-barrier


def main() -> None:
    x, total = torch.randn(16, 64, device="cuda"), torch.zeros(64, device="cuda")
    _locked_kernel[(16,)](x, total, torch.zeros(1, dtype=torch.int32, device="cuda"), COLS=64)
    torch.testing.assert_close(total, x.sum(0))


if __name__ == "__main__":
    main()
