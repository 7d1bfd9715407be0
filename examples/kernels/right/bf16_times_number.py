"""A number of the launch's is fp32 on a GPU, so bf16 times it is fp32: the product is rounded once."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _axpy_kernel(x_ptr, y_ptr, factor, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    y = factor * tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, y, mask=mask)


def main() -> None:
    x, y = (torch.randn(300, dtype=torch.bfloat16) for _ in range(2))
    wanted = (0.3 * x.float() + y.float()).to(torch.bfloat16)
    _axpy_kernel[(3,)](x, y, 0.3, 300, BLOCK=128)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)


if __name__ == "__main__":
    main()
