"""One program sets the sum to zero, and nothing says that it comes before the others add to it."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_kernel(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + at, mask=at < n, other=0), axis=0)
    if tl.program_id(0) == 0:
        tl.store(sum_ptr, 0)  # planted: race
    tl.atomic_add(sum_ptr, part)  # planted: race


def main() -> None:
    x, total = torch.randint(0, 9, (500,), device="cuda", dtype=torch.int32), torch.empty(1, device="cuda").int()
    _sum_kernel[(4,)](x, total, 500, BLOCK=128)
    assert total.item() == x.sum()


if __name__ == "__main__":
    main()
