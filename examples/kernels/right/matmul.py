"""A matrix product with masks on all three sides; bf16 in, fp32 inside."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak
    b_ptrs = b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, tl.cdiv(K, BLOCK_K)):
        left = K - start * BLOCK_K
        a = tl.load(a_ptrs, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + m[:, None] * stride_cm + n[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(tl.bfloat16), mask=(m[:, None] < M) & (n[None, :] < N))


def main() -> None:
    a = torch.randn(70, 50, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(40, 50, device="cuda", dtype=torch.bfloat16).t()
    c = torch.empty(70, 40, device="cuda", dtype=torch.bfloat16)
    grid = (triton.cdiv(70, 32), triton.cdiv(40, 16))
    _matmul_kernel[grid](a, b, c, 70, 40, 50, *a.stride(), *b.stride(), *c.stride(), BLOCK_M=32, BLOCK_N=16, BLOCK_K=32)
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2**-7, atol=1e-4)


if __name__ == "__main__":
    main()
