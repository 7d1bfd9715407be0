"""A view of every other column of a wider tensor, by its strides."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, y_ptr, cols, x_row, x_col, y_row, y_col, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + col * x_col, mask=col < cols)
    tl.store(y_ptr + row * y_row + col * y_col, x, mask=col < cols)


def main() -> None:
    x = torch.randn(12, 80)[2:, 1:61:2]
    wide = torch.zeros(64, 10)
    y = wide.t()[:, 3:33]
    _copy_kernel[(10,)](x, y, 30, *x.stride(), *y.stride(), BLOCK=32)
    torch.testing.assert_close(y, x)
    assert wide[33:].abs().sum() == 0


if __name__ == "__main__":
    main()
