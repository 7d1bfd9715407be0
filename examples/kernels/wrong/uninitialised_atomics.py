"""Atomics add to memory that torch.empty made."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _histogram_kernel(x_ptr, bins_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.atomic_add(bins_ptr + x, 1, mask=mask)  # planted: uninitialised-read


def main() -> None:
    x = torch.arange(512) % 16
    bins = torch.empty(16, dtype=torch.int32)
    _histogram_kernel[(4,)](x, bins, 512, BLOCK=128)
    print(bins)


if __name__ == "__main__":
    main()
