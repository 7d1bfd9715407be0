"""The last block of a matrix product's inner dimension: neither side says what lies behind its end."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _product_kernel(a_ptr, b_ptr, c_ptr, inner, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, inner, K):
        left = start + k < inner
        a = tl.load(a_ptr + m[:, None] * inner + (start + k)[None, :], mask=left[None, :])  # planted: undefined-lanes
        b = tl.load(b_ptr + (start + k)[:, None] * N + n[None, :], mask=left[:, None])
        total += tl.dot(a, b)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total)


def main() -> None:
    a, b = torch.randn(16, 40, device="cuda"), torch.randn(40, 16, device="cuda")
    c = torch.empty(16, 16, device="cuda")
    _product_kernel[(1,)](a, b, c, 40, M=16, N=16, K=32)
    torch.testing.assert_close(c, a @ b, atol=1e-2, rtol=1e-2)


if __name__ == "__main__":
    main()
