"""Split-K: each program has a piece of k, and adds its part of the sum to the result by atomics."""

import torch
import triton
import triton.language as tl

M, N, K = 32, 64, 128
SPLITS = 64  # pieces, or more
LONGEST = 1024  # of a piece: tensor cores cut off low bits, the more the longer a sum grows


@triton.jit
def split_k_kernel(
    a_ptr, b_ptr, out_ptr, m, n, k, piece, a_row, a_col, b_row, b_col,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * M + tl.arange(0, M)
    col = tl.program_id(1) * N + tl.arange(0, N)
    first = tl.program_id(2) * piece
    total = tl.zeros([M, N], dtype=tl.float32)
    for start in range(first, tl.minimum(first + piece, k), K):
        inner = start + tl.arange(0, K)
        a_mask = (row[:, None] < m) & (inner[None, :] < k)
        b_mask = (inner[:, None] < k) & (col[None, :] < n)
        a = tl.load(a_ptr + row[:, None] * a_row + inner[None, :] * a_col, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + inner[:, None] * b_row + col[None, :] * b_col, mask=b_mask, other=0.0)
        total = tl.dot(a, b, total)
    mask = (row[:, None] < m) & (col[None, :] < n)
    tl.atomic_add(out_ptr + row[:, None] * n + col[None, :], total, mask=mask, sem="relaxed")


def split_k(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    m, k = a.shape
    n = b.shape[1]
    piece = min(triton.cdiv(triton.cdiv(k, K), SPLITS) * K, LONGEST)
    out.zero_()
    grid = (triton.cdiv(m, M), triton.cdiv(n, N), triton.cdiv(k, piece))
    split_k_kernel[grid](a, b, out, m, n, k, piece, *a.stride(), *b.stride(), M=M, N=N, K=K)
