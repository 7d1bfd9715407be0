"""A running sum along rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _cumsum_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0)
    tl.store(y_ptr + row * cols + col, tl.cumsum(x, axis=0), mask=col < cols)


def main() -> None:
    x = torch.randn(6, 90)
    y = torch.empty_like(x)
    _cumsum_kernel[(6,)](x, y, 90, BLOCK=128)
    torch.testing.assert_close(y, x.cumsum(1))


if __name__ == "__main__":
    main()
