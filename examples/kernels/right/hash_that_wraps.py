"""A hash may wrap around in 32 bits: it is no address."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _dropout_kernel(x_ptr, y_ptr, n, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    bits = (offsets + seed) * 1103515245 + 12345
    keep = (bits & 0x10000) == 0
    tl.store(y_ptr + offsets, tl.where(keep, tl.load(x_ptr + offsets, mask=mask), 0.0), mask=mask)


def main() -> None:
    x = torch.randn(500)
    y = torch.empty_like(x)
    _dropout_kernel[(4,)](x, y, 500, 42, BLOCK=128)
    assert ((y == x) | (y == 0)).all()


if __name__ == "__main__":
    main()
