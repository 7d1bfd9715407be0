"""The last program adds what the others have stored, but a relaxed atomic orders nothing."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_kernel(x_ptr, parts_ptr, sum_ptr, count_ptr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    program, at = tl.program_id(0), tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + program * BLOCK + at), axis=0)
    tl.store(parts_ptr + program, part)  # planted: race
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem="relaxed") == PROGRAMS - 1:
        parts = tl.load(parts_ptr + tl.arange(0, PROGRAMS))  # planted: race
        tl.store(sum_ptr, tl.sum(parts, axis=0))


def main() -> None:
    x, total = torch.randn(1024, device="cuda"), torch.empty(1, device="cuda")
    parts, count = torch.empty(8, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    _sum_kernel[(8,)](x, parts, total, count, BLOCK=128, PROGRAMS=8)
    torch.testing.assert_close(total[0], x.sum())


if __name__ == "__main__":
    main()
