"""Tiles by a tensor descriptor, which keeps to its shape by itself."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _tile_copy_kernel(x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[rows, cols], strides=[cols, 1], block_shape=[BLOCK, BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, shape=[rows, cols], strides=[cols, 1], block_shape=[BLOCK, BLOCK])
    row, col = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    y.store([row, col], x.load([row, col]))


def main() -> None:
    x = torch.randn(20, 40)
    y = torch.empty_like(x)
    _tile_copy_kernel[(2, 3)](x, y, 20, 40, BLOCK=16)
    assert torch.equal(x, y)


if __name__ == "__main__":
    main()
