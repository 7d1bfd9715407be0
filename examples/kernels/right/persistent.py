"""Four programs share eleven tiles."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _cube_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        x = tl.load(x_ptr + offsets, mask=mask)
        tl.store(y_ptr + offsets, x * x * x, mask=mask)


def main() -> None:
    x = torch.randn(700)
    y = torch.empty_like(x)
    _cube_kernel[(4,)](x, y, 700, BLOCK=64)
    torch.testing.assert_close(y, x**3)


if __name__ == "__main__":
    main()
