"""Rows in fp8 with a scale each; rounded as a GPU does, subnormals and all. (An A100 has no such type.)"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _quantise_kernel(x_ptr, y_ptr, scale_ptr, cols, BLOCK: tl.constexpr):  # information: does-not-compile
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), axis=0) / 448.0
    tl.store(scale_ptr + row, scale)
    tl.store(y_ptr + row * cols + col, (x / scale).to(tl.float8e4nv), mask=col < cols)


def main() -> None:
    x = torch.randn(4, 60, dtype=torch.bfloat16) ** 5
    y = torch.empty(4, 60, dtype=torch.float8_e4m3fn)
    scale = torch.empty(4)
    _quantise_kernel[(4,)](x, y, scale, 60, BLOCK=64)
    wanted = (x.float() / scale[:, None]).to(torch.float8_e4m3fn)
    torch.testing.assert_close(y.float(), wanted.float(), rtol=0, atol=0)


if __name__ == "__main__":
    main()
