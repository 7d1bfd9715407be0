"""A mean in bf16, summed in fp32 around a loop."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _mean_kernel(x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(rows):
        total += tl.load(x_ptr + row * cols + col, mask=col < cols, other=0.0)
    tl.store(y_ptr + col, (total / rows).to(tl.bfloat16), mask=col < cols)


def main() -> None:
    x = torch.ones(600, 20, dtype=torch.bfloat16)
    y = torch.empty(20, dtype=torch.bfloat16)
    _mean_kernel[(1,)](x, y, 600, 20, BLOCK=32)
    assert y.tolist() == [1.0] * 20


if __name__ == "__main__":
    main()
