"""A buffer larger than what it holds; only the part that was written is read."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _partial_sum_kernel(x_ptr, part_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(part_ptr + pid, tl.sum(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0), axis=0))


@triton.jit
def _total_kernel(part_ptr, total_ptr, parts, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(total_ptr, tl.sum(tl.load(part_ptr + lane, mask=lane < parts, other=0.0), axis=0))


def main() -> None:
    x = torch.randn(1000)
    parts, total = torch.empty(64), torch.empty(1)
    _partial_sum_kernel[(8,)](x, parts, 1000, BLOCK=128)
    _total_kernel[(1,)](parts, total, 8, BLOCK=64)
    torch.testing.assert_close(total[0], x.sum())


if __name__ == "__main__":
    main()
