"""A product of matrices. Page: `sublight learn show matmul`. Check: `sublight learn check matmul`."""

import torch
import triton
import triton.language as tl

M, N, K = 32, 32, 16  # TODO 2: larger tiles, until the goal is met


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, m, n, k, a_row, a_col, b_row, b_col, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    row = tl.program_id(0) * M + tl.arange(0, M)
    col = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, k, K):
        inner = start + tl.arange(0, K)
        a_mask = (row[:, None] < m) & (inner[None, :] < k)
        b_mask = (inner[:, None] < k) & (col[None, :] < n)
        a = tl.load(a_ptr + row[:, None] * a_row + inner[None, :] * a_col, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + inner[:, None] * b_row + col[None, :] * b_col, mask=b_mask, other=0.0)
        products = a[:, :, None].to(tl.float32) * b[None, :, :].to(tl.float32)  # M by K by N of them
        total += tl.sum(products, axis=1)  # TODO 1: by tl.dot, which the tensor cores compute
    tl.store(out_ptr + row[:, None] * n + col[None, :], total, mask=(row[:, None] < m) & (col[None, :] < n))


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    m, k = a.shape
    n = b.shape[1]
    grid = (triton.cdiv(m, M), triton.cdiv(n, N))
    matmul_kernel[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), M=M, N=N, K=K)
