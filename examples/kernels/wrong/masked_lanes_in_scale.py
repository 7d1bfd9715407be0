"""Masked loads without `other` enter the largest absolute value, a sort and the lanes that a gather takes."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _quantize_kernel(x_ptr, q_ptr, scale_ptr, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols)  # planted: undefined-lanes
    scale = tl.max(tl.abs(x), axis=0) / 127
    tl.store(scale_ptr + row, scale)
    tl.store(q_ptr + row * cols + at, (x / scale).to(tl.int8), mask=at < cols)


@triton.jit
def _median_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols)  # planted: undefined-lanes
    tl.store(y_ptr + row * cols + at, tl.sort(x + 1), mask=at < cols)


@triton.jit
def _shift_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols)  # planted: undefined-lanes
    tl.store(y_ptr + row * cols + at, tl.gather(x, (at + 20) % BLOCK, 0), mask=at < cols)


def main() -> None:
    x = torch.randn(4, 50, device="cuda")
    q, scale = torch.empty(4, 50, dtype=torch.int8, device="cuda"), torch.empty(4, device="cuda")
    _quantize_kernel[(4,)](x, q, scale, 50, BLOCK=64)
    _median_kernel[(4,)](x, torch.empty_like(x), 50, BLOCK=64)
    _shift_kernel[(4,)](x, torch.empty_like(x), 50, BLOCK=64)


if __name__ == "__main__":
    main()
