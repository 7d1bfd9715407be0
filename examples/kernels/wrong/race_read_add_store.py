"""Counting by load, add and store loses counts."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _count_kernel(x_ptr, count_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    count = tl.load(count_ptr)  # planted: race
    tl.store(count_ptr, count + tl.sum(x, axis=0))  # planted: race


def main() -> None:
    x = torch.randint(0, 2, (640,), dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    _count_kernel[(5,)](x, count, 640, BLOCK=128)
    assert count.item() == x.sum().item()  # one program after another, it is right


if __name__ == "__main__":
    main()
