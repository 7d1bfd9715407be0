"""`other=0.0` where it is not neutral: 0 wins a maximum of negative numbers, (0 - mean)² is part of no variance, and
keys that are not there get their share of a softmax.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _row_max_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=0.0)
    tl.store(y_ptr + row, tl.max(x, axis=0))  # planted: padded-lanes


@triton.jit
def _variance_kernel(x_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=0.0)
    centred = x - tl.sum(x, axis=0) / cols
    tl.store(y_ptr + row, tl.sum(centred * centred, axis=0) / cols)  # planted: padded-lanes


@triton.jit
def _variance_in_pieces_kernel(x_ptr, mean_ptr, y_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    mean, total = tl.load(mean_ptr + row), tl.zeros([BLOCK], tl.float32)
    for start in range(0, cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        centred = tl.load(x_ptr + row * cols + at, mask=at < cols, other=0.0) - mean
        total += centred * centred  # planted: padded-lanes
    tl.store(y_ptr + row, tl.sum(total, axis=0) / cols)


@triton.jit
def _attention_kernel(q_ptr, k_ptr, v_ptr, o_ptr, n, D: tl.constexpr, BLOCK: tl.constexpr):
    at, d = tl.arange(0, BLOCK), tl.arange(0, D)
    there = (at < n)[:, None]
    q = tl.load(q_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
    k = tl.load(k_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
    v = tl.load(v_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
    scores = tl.dot(q, tl.trans(k))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    weights /= tl.sum(weights, axis=1)[:, None]  # planted: padded-lanes
    tl.store(o_ptr + at[:, None] * D + d[None, :], tl.dot(weights, v), mask=there)


def main() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 100, device="cuda"), torch.empty(4, device="cuda")
    _row_max_kernel[(4,)](x, y, 100, BLOCK=128)
    torch.testing.assert_close(y, x.amax(1))  # each of these rows has a positive number
    _variance_kernel[(4,)](x, y, 100, BLOCK=128)
    _variance_in_pieces_kernel[(4,)](x, x.mean(1), y, 100, BLOCK=64)
    q, k, v = torch.randn(3, 20, 16, device="cuda")
    _attention_kernel[(1,)](q, k, v, torch.empty_like(q), 20, D=16, BLOCK=32)


if __name__ == "__main__":
    main()
