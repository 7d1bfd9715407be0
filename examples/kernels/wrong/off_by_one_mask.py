"""A mask with `<=` lets one lane past the end."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets <= n
    x = tl.load(x_ptr + offsets, mask=mask)  # planted: out-of-bounds
    tl.store(y_ptr + offsets, 2 * x, mask=mask)  # planted: out-of-bounds


def main() -> None:
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    _double_kernel[(triton.cdiv(1000, 128),)](x, y, 1000, BLOCK=128)
    torch.testing.assert_close(y, 2 * x)


if __name__ == "__main__":
    main()
