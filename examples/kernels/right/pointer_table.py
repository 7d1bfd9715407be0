"""Tensors of several sizes, reached by addresses that a tensor holds, and a pair that comes as a tuple."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _double_kernel(table_ptr, sizes_ptr, BLOCK: tl.constexpr):
    which = tl.program_id(0)
    x_ptr = tl.load(table_ptr + which).to(tl.pointer_type(tl.float32))
    offsets = tl.arange(0, BLOCK)
    mask = offsets < tl.load(sizes_ptr + which)
    tl.store(x_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def _copy_kernel(pair, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pair[1] + offsets, tl.load(pair[0] + offsets, mask=offsets < n), mask=offsets < n)


def main() -> None:
    tensors = [torch.ones(size, device="cuda") for size in (10, 33, 64)]
    table = torch.tensor([x.data_ptr() for x in tensors], device="cuda")
    sizes = torch.tensor([x.numel() for x in tensors], device="cuda")
    _double_kernel[(3,)](table, sizes, BLOCK=64)
    assert all((x == 2).all() for x in tensors)
    y = torch.empty_like(tensors[2])
    _copy_kernel[(2,)]((tensors[2], y), 64, BLOCK=32)
    assert (y == 2).all()


if __name__ == "__main__":
    main()
