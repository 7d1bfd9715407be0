"""Tiles of 256 that start every 128 elements: each element is stored twice, this time with the same value."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _relu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, tl.maximum(x, 0.0), mask=mask)  # planted: race


def main() -> None:
    x = torch.randn(1024, device="cuda", dtype=torch.float16)
    y = torch.empty_like(x)
    _relu_kernel[(8,)](x, y, 1024, BLOCK=256)
    torch.testing.assert_close(y, x.relu())


if __name__ == "__main__":
    main()
