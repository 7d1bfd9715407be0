"""Masked loads without `other` that harm nobody: their lanes are masked off again before they count."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _mean_kernel(x_ptr, y_ptr, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Whole rows are masked off, and their means are not stored."""
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row[:, None] * cols + at[None, :], mask=(row < rows)[:, None])
    tl.store(y_ptr + row, tl.sum(x, axis=1) / cols, mask=row < rows)


@triton.jit
def _max_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """tl.where gives them a value."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr, tl.max(tl.where(at < n, 2 * x, float("-inf")), axis=0))


@triton.jit
def _product_kernel(a_ptr, b_ptr, c_ptr, inner, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The other side of the product has zeros there."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * inner + k[None, :], mask=(k < inner)[None, :], other=0.0)
    b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k < inner)[:, None])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def _running_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """A running sum goes forward, and what has no value comes last."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, tl.cumsum(x, axis=0), mask=at < n)


def main() -> None:
    x = torch.rand(5, 64, device="cuda")
    mean, top, running = torch.empty(5, device="cuda"), torch.empty(1, device="cuda"), torch.empty(50, device="cuda")
    _mean_kernel[(2,)](x, mean, 5, 64, ROWS=4, BLOCK=64)
    torch.testing.assert_close(mean, x.mean(1))
    _max_kernel[(1,)](x, top, 50, BLOCK=64)
    torch.testing.assert_close(top[0], 2 * x[0, :50].amax())
    _running_kernel[(1,)](x, running, 50, BLOCK=64)
    torch.testing.assert_close(running, x[0, :50].cumsum(0))
    a, b = torch.randn(16, 20, device="cuda"), torch.randn(20, 16, device="cuda")
    c = torch.empty(16, 16, device="cuda")
    _product_kernel[(1,)](a, b, c, 20, M=16, N=16, K=32)
    torch.testing.assert_close(c, a @ b, atol=1e-2, rtol=1e-2)


if __name__ == "__main__":
    main()
