"""A block is written and read back in reverse: each lane reads what another thread may not have written yet."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _reverse_kernel(x_ptr, work_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    back = tl.program_id(0) * BLOCK + BLOCK - 1 - tl.arange(0, BLOCK)
    tl.store(work_ptr + at, 2 * tl.load(x_ptr + at))
    tl.store(y_ptr + at, tl.load(work_ptr + back))  # planted: missing-barrier


def main() -> None:
    x = torch.randn(512, device="cuda")
    work, y = torch.empty_like(x), torch.empty_like(x)
    _reverse_kernel[(2,)](x, work, y, BLOCK=256)
    torch.testing.assert_close(y, (2 * x).view(2, 256).flip(1).view(-1))


if __name__ == "__main__":
    main()
