"""The load is masked, the store is not."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _negate_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, -x)  # planted: out-of-bounds


def main() -> None:
    x = torch.randn(300)
    y = torch.empty_like(x)
    _negate_kernel[(3,)](x, y, 300, BLOCK=128)
    torch.testing.assert_close(y, -x)


if __name__ == "__main__":
    main()
