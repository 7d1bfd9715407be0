"""The script expects what a GPU does not give: 256 + 1 is 256 in bf16."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _increment_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, x + tl.full((BLOCK,), 1.0, tl.bfloat16), mask=mask)


def main() -> None:
    x = torch.full((16,), 256.0, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    _increment_kernel[(1,)](x, y, 16, BLOCK=16)
    assert y.float().sum().item() == 257 * 16  # planted: script-failed


if __name__ == "__main__":
    main()
