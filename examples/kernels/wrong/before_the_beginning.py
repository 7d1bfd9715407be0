"""The left neighbour of the first element is not there."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _difference_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    here = tl.load(x_ptr + offsets, mask=mask)
    left = tl.load(x_ptr + offsets - 1, mask=mask)  # planted: out-of-bounds
    tl.store(y_ptr + offsets, tl.where(offsets > 0, here - left, here), mask=mask)


def main() -> None:
    x = torch.randn(500)
    y = torch.empty_like(x)
    _difference_kernel[(4,)](x, y, 500, BLOCK=128)
    torch.testing.assert_close(y[1:], x[1:] - x[:-1])


if __name__ == "__main__":
    main()
