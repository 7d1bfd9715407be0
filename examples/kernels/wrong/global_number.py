"""The compiler takes no global that is not a constexpr; the interpreter does."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

SCALE = 0.5


@triton.jit
def _scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * SCALE, mask=mask)  # planted: does-not-compile


def main() -> None:
    x = torch.randn(100)
    y = torch.empty_like(x)
    _scale_kernel[(1,)](x, y, 100, BLOCK=128)
    torch.testing.assert_close(y, x * SCALE)


if __name__ == "__main__":
    main()
