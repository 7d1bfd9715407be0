"""One tensor plus another, masked."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + tl.load(y_ptr + offsets, mask=mask), mask=mask)


def main() -> None:
    device = triton.runtime.driver.active.get_active_torch_device()
    x, y = torch.randn(98_432, device=device), torch.randn(98_432, device=device)
    assert x.is_cuda and x.device == device
    out = torch.empty_like(x)
    _add_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel(), BLOCK=1024)
    torch.testing.assert_close(out, x + y)


if __name__ == "__main__":
    main()
