"""A block is written and read back: by the same lanes, behind a barrier, by a single warp, in another launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _reverse_kernel(x_ptr, work_ptr, y_ptr, BLOCK: tl.constexpr):
    at, back = tl.arange(0, BLOCK), BLOCK - 1 - tl.arange(0, BLOCK)
    tl.store(work_ptr + at, 2 * tl.load(x_ptr + at))
    tl.debug_barrier()
    tl.store(y_ptr + at, tl.load(work_ptr + back))


@triton.jit
def _one_warp_kernel(x_ptr, work_ptr, y_ptr, BLOCK: tl.constexpr):
    at, back = tl.arange(0, BLOCK), BLOCK - 1 - tl.arange(0, BLOCK)
    tl.store(work_ptr + at, 2 * tl.load(x_ptr + at))
    tl.store(y_ptr + at, tl.load(work_ptr + back))


@triton.jit
def _twice_kernel(x_ptr, work_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(work_ptr + at, 2 * tl.load(x_ptr + at))
    tl.store(y_ptr + at, 2 * tl.load(work_ptr + at))


@triton.jit
def _back_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at, back = tl.arange(0, BLOCK), BLOCK - 1 - tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + back))


def main() -> None:
    x = torch.randn(256, device="cuda")
    work, y = torch.empty_like(x), torch.empty_like(x)
    _reverse_kernel[(1,)](x, work, y, BLOCK=256)
    torch.testing.assert_close(y, (2 * x).flip(0))
    _one_warp_kernel[(1,)](x, work, y, BLOCK=256, num_warps=1)
    torch.testing.assert_close(y, (2 * x).flip(0))
    _twice_kernel[(1,)](x, work, y, BLOCK=256)
    torch.testing.assert_close(y, 4 * x)
    _back_kernel[(1,)](y, work, BLOCK=256)
    torch.testing.assert_close(work, (4 * x).flip(0))


if __name__ == "__main__":
    main()
