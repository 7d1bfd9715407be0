"""Layer norm in two passes over a row that is longer than a block."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _layer_norm_kernel(x_ptr, y_ptr, w_ptr, b_ptr, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / cols
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
        centred = tl.where(col < cols, x - mean, 0.0)
        total += centred * centred
    scale = 1 / tl.sqrt(tl.sum(total, axis=0) / cols + eps)
    for start in range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + row * cols + col, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * scale * tl.load(w_ptr + col, mask=mask) + tl.load(b_ptr + col, mask=mask)
        tl.store(y_ptr + row * cols + col, y, mask=mask)


def main() -> None:
    x = torch.randn(9, 300, dtype=torch.bfloat16)
    w, b = torch.randn(300), torch.randn(300)
    y = torch.empty_like(x)
    _layer_norm_kernel[(9,)](x, y, w, b, 300, 1e-5, BLOCK=128)
    wanted = torch.nn.functional.layer_norm(x.float(), (300,), w, b)
    torch.testing.assert_close(y, wanted.bfloat16(), rtol=2**-7, atol=1e-6)


if __name__ == "__main__":
    main()
