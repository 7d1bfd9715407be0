"""Shifting in place reads what the next program overwrites."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _shift_kernel(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    right = tl.load(x_ptr + offsets + 1, mask=offsets + 1 < n, other=0.0)  # planted: race
    tl.store(x_ptr + offsets, right, mask=offsets < n)  # planted: race


def main() -> None:
    x = torch.randn(512)
    wanted = torch.cat([x[1:], torch.zeros(1)])
    _shift_kernel[(4,)](x, 512, BLOCK=128)
    torch.testing.assert_close(x, wanted)


if __name__ == "__main__":
    main()
