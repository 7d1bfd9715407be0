"""A tensor descriptor that claims one row too many."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, y_ptr, rows, cols, TILE: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[rows + 1, cols], strides=[cols, 1], block_shape=[TILE, TILE])
    y = tl.make_tensor_descriptor(y_ptr, shape=[rows, cols], strides=[cols, 1], block_shape=[TILE, TILE])
    row = tl.program_id(0) * TILE
    y.store([row, 0], x.load([row, 0]))  # planted: out-of-bounds


def main() -> None:
    x = torch.randn(20, 16)
    y = torch.empty_like(x)
    _copy_kernel[(2,)](x, y, 20, 16, TILE=16)
    torch.testing.assert_close(y, x)


if __name__ == "__main__":
    main()
