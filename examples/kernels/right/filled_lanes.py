"""Lanes that `other` fills and that harm nobody, though they look like it."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _quantize_kernel(x_ptr, q_ptr, scale_ptr, cols, BLOCK: tl.constexpr):
    """0 is the least of absolute values."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-8) / 127
    tl.store(scale_ptr + row, scale)
    tl.store(q_ptr + row * cols + at, (x / scale).to(tl.int8), mask=at < cols)


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    """The maximum may be too large: it falls out of the quotient."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=0.0)
    y = tl.where(at < cols, tl.exp(x - tl.max(x, axis=0)), 0.0)
    tl.store(y_ptr + row * cols + at, y / tl.sum(y, axis=0), mask=at < cols)


@triton.jit
def _range_kernel(x_ptr, low_ptr, high_ptr, cols, BLOCK: tl.constexpr):
    """A range that is to hold 0."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=0.0)
    tl.store(low_ptr + row, tl.minimum(tl.min(x, axis=0), 0.0))
    tl.store(high_ptr + row, tl.maximum(tl.max(x, axis=0), 0.0))


@triton.jit
def _causal_kernel(q_ptr, k_ptr, v_ptr, o_ptr, n, D: tl.constexpr, BLOCK: tl.constexpr):
    """Keys that are not there come after every query that is."""
    at, d = tl.arange(0, BLOCK), tl.arange(0, D)
    there = (at < n)[:, None]
    q = tl.load(q_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
    k = tl.load(k_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
    v = tl.load(v_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
    scores = tl.where(at[:, None] >= at[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    out = tl.dot(weights, v) / tl.sum(weights, axis=1)[:, None]
    tl.store(o_ptr + at[:, None] * D + d[None, :], out, mask=there)


@triton.jit
def _gradient_kernel(x_ptr, dy_ptr, dw_ptr, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A row that is not there has a large x̂, and a gradient of 0."""
    row, at = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    there = (row[:, None] < rows) & (at[None, :] < cols)
    x = tl.load(x_ptr + row[:, None] * cols + at[None, :], mask=there, other=0.5)
    dy = tl.load(dy_ptr + row[:, None] * cols + at[None, :], mask=there, other=0.0)
    tl.store(dw_ptr + at, tl.sum(dy * (x - 3.0), axis=0), mask=at < cols)


@triton.jit
def _blur_kernel(x_ptr, y_ptr, n, EDGE: tl.constexpr, BLOCK: tl.constexpr):
    """Beyond the ends there is a value that is meant to count."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for shift in range(3):
        from_ = at + shift - 1
        total += tl.load(x_ptr + from_, mask=(from_ >= 0) & (from_ < n), other=EDGE)
    tl.store(y_ptr + at, total / 3, mask=at < n)


def main() -> None:
    torch.manual_seed(0)
    x, y, row = (torch.randn(4, 100, device="cuda") for _ in range(3))
    scale, low, high = torch.empty(3, 4, device="cuda")
    _quantize_kernel[(4,)](x, torch.empty(4, 100, device="cuda", dtype=torch.int8), scale, 100, BLOCK=128)
    torch.testing.assert_close(scale, x.abs().amax(1) / 127)
    _softmax_kernel[(4,)](x, y, 100, BLOCK=128)
    torch.testing.assert_close(y, x.softmax(1))
    _range_kernel[(4,)](x, low, high, 100, BLOCK=128)
    torch.testing.assert_close(high, x.amax(1).clamp(min=0))
    q, k, v = torch.randn(3, 20, 16, device="cuda")
    out = torch.empty_like(q)
    _causal_kernel[(1,)](q, k, v, out, 20, D=16, BLOCK=32)
    scores = (q @ k.T).masked_fill(torch.ones(20, 20, device="cuda").triu(1).bool(), float("-inf"))
    torch.testing.assert_close(out, scores.softmax(1) @ v, atol=1e-2, rtol=1e-2)
    dw = torch.empty(100, device="cuda")
    _gradient_kernel[(1,)](x, row, dw, 4, 100, ROWS=8, BLOCK=128)
    torch.testing.assert_close(dw, (row * (x - 3)).sum(0))
    blurred = torch.empty(100, device="cuda")
    _blur_kernel[(1,)](x, blurred, 100, EDGE=2.0, BLOCK=128)
    torch.testing.assert_close(blurred[0], (2.0 + x[0, 0] + x[0, 1]) / 3)


if __name__ == "__main__":
    main()
