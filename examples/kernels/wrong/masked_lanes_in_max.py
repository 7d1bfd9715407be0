"""A masked load without `other`: the lanes it leaves out have no value, and the maximum takes them in."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _row_max_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols)  # planted: undefined-lanes
    tl.store(y_ptr + row, tl.max(x, axis=0))


def main() -> None:
    x = torch.rand(4, 100, device="cuda")  # positive, so that a zero does not show
    y = torch.empty(4, device="cuda")
    _row_max_kernel[(4,)](x, y, 100, BLOCK=128)
    torch.testing.assert_close(y, x.amax(1))


if __name__ == "__main__":
    main()
