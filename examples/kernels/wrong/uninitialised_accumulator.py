"""The sum is kept in memory that torch.empty made."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _accumulate_kernel(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(sum_ptr + offsets, mask=mask)  # planted: uninitialised-read
    total += tl.load(x_ptr + offsets, mask=mask)
    tl.store(sum_ptr + offsets, total, mask=mask)


def main() -> None:
    x = torch.randn(200, device="cuda")
    total = x.new_empty(200)
    for _ in range(3):
        _accumulate_kernel[(2,)](x, total, 200, BLOCK=128)
    print(total.sum())


if __name__ == "__main__":
    main()
