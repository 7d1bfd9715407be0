"""One tensor ends where the next begins: reading past the end meets real numbers."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _window_sum_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask=mask)
    total += tl.load(x_ptr + offsets + 1, mask=mask)  # planted: out-of-bounds
    tl.store(y_ptr + offsets, total, mask=mask)


def main() -> None:
    both = torch.randn(2, 256)
    x, y = both[0], torch.zeros(256)
    _window_sum_kernel[(2,)](x, y, 256, BLOCK=128)
    print(y.sum())


if __name__ == "__main__":
    main()
