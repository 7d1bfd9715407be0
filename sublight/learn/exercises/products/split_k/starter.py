"""Split-K with atomics. Page: `sublight learn show split_k`. Check: `sublight learn check split_k`."""

import torch
import triton
import triton.language as tl

M, N, K = 32, 64, 128
SPLITS = 64


@triton.jit
def split_k_kernel(
    a_ptr, b_ptr, out_ptr, m, n, k, piece, a_row, a_col, b_row, b_col,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * M + tl.arange(0, M)
    col = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, k, K):  # TODO 1: the program's own piece of k alone
        inner = start + tl.arange(0, K)
        a_mask = (row[:, None] < m) & (inner[None, :] < k)
        b_mask = (inner[:, None] < k) & (col[None, :] < n)
        a = tl.load(a_ptr + row[:, None] * a_row + inner[None, :] * a_col, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + inner[:, None] * b_row + col[None, :] * b_col, mask=b_mask, other=0.0)
        total = tl.dot(a, b, total)
    mask = (row[:, None] < m) & (col[None, :] < n)
    tl.store(out_ptr + row[:, None] * n + col[None, :], total, mask=mask)  # TODO 2: add to what others add


def split_k(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    m, k = a.shape
    n = b.shape[1]
    piece = triton.cdiv(triton.cdiv(k, K), SPLITS) * K  # whole blocks of K
    # TODO 3: a sum begins with zero, and the grid's third dimension counts the pieces
    grid = (triton.cdiv(m, M), triton.cdiv(n, N), 1)
    split_k_kernel[grid](a, b, out, m, n, k, piece, *a.stride(), *b.stride(), M=M, N=N, K=K)
