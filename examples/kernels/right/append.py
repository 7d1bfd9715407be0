"""Programs take places in an output by a counter: in any order, and never twice."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _keep_positive_kernel(x_ptr, y_ptr, count_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    keep = (x > 0).to(tl.int32)
    first = tl.atomic_add(count_ptr, tl.sum(keep, axis=0))
    tl.store(y_ptr + first + tl.cumsum(keep, axis=0) - 1, x, mask=x > 0)


def main() -> None:
    x = torch.randn(300)
    y = torch.empty_like(x)
    count = torch.zeros(1, dtype=torch.int32)
    _keep_positive_kernel[(3,)](x, y, count, 300, BLOCK=128)
    assert torch.equal(y[: count.item()].sort().values, x[x > 0].sort().values)


if __name__ == "__main__":
    main()
