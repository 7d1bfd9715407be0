"""A relaxed counter gives each program a place of its own, which needs no order."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _keep_positive_kernel(x_ptr, kept_ptr, count_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    is_kept = (x > 0).to(tl.int32)
    first = tl.atomic_add(count_ptr, tl.sum(is_kept, axis=0), sem="relaxed")
    tl.store(kept_ptr + first + tl.cumsum(is_kept, axis=0) - 1, x, mask=x > 0)


def main() -> None:
    x, kept = torch.randn(1000, device="cuda"), torch.empty(1000, device="cuda")
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    _keep_positive_kernel[(8,)](x, kept, count, 1000, BLOCK=128)
    assert torch.equal(kept[: count.item()].sort().values, x[x > 0].sort().values)


if __name__ == "__main__":
    main()
