"""Every program stores its part into one total."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_kernel(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(total_ptr, tl.sum(x, axis=0))  # planted: race


def main() -> None:
    x = torch.randn(1024)
    total = torch.zeros(1)
    _sum_kernel[(8,)](x, total, 1024, BLOCK=128)
    print(total)


if __name__ == "__main__":
    main()
