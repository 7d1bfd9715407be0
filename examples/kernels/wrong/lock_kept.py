"""A lock that is taken and never given back: the next program waits for ever."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_kernel(x_ptr, total_ptr, lock_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:  # planted: lock-kept
        pass
    tl.store(total_ptr, tl.load(total_ptr) + tl.sum(x))


def main() -> None:
    x = torch.randn(512, device="cuda")
    total, lock = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda", dtype=torch.int32)
    _sum_kernel[(4,)](x, total, lock, BLOCK=128)
    torch.testing.assert_close(total[0], x.sum())


if __name__ == "__main__":
    main()
