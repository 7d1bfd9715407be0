"""A permutation: no address twice."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _permute_kernel(index_ptr, x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    to = tl.load(index_ptr + offsets, mask=mask, other=0)
    tl.store(y_ptr + to, tl.load(x_ptr + offsets, mask=mask), mask=mask)


def main() -> None:
    x = torch.randn(333)
    to = torch.randperm(333)
    y = torch.empty_like(x)
    _permute_kernel[(3,)](to, x, y, 333, BLOCK=128)
    assert torch.equal(y[to], x)


if __name__ == "__main__":
    main()
