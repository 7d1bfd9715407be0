"""fp32 is made bf16 by taking its upper half, which cuts off and does not round."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _to_bf16_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    bits = tl.load(x_ptr + offsets, mask=mask).to(tl.uint32, bitcast=True)
    upper = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)  # planted: bf16-truncation
    tl.store(y_ptr + offsets, upper, mask=mask)


def main() -> None:
    x = torch.randn(256, device="cuda")
    y = torch.empty(256, dtype=torch.bfloat16, device="cuda")
    _to_bf16_kernel[(2,)](x, y, 256, BLOCK=128)
    torch.testing.assert_close(y.float(), x, rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    main()
