"""The first two steps on the way to a fast product: what the second changes is its whole point; no tensor cores yet.

Both compute a tile of C = A @ B with its epilogue; A is (m, k), B (k, n), of any strides.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.epilogue import finished

CHAIN = tl.constexpr(32)  # sums of so many products are added up by themselves


@triton.jit
def _naive_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, am, ak, bk, bn, batch_a, batch_b,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One step of k at a time: a column of A, a row of B, a multiply-add for each element of the tile.

    A linear layer's operands lie along k, so the elements of a column are a row apart: of each 32 bytes that memory
    hands out one element is used, and the rest must wait in the cache for the next steps.
    """
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    col = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    a_at, b_at = a_ptr + batch * batch_a + row * am, b_ptr + batch * batch_b + col * bn
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, CHAIN):
        part = tl.zeros([BM, BN], tl.float32)  # one chain over all of k would lose twice what cuBLAS loses in fp32
        for _ in range(start, tl.minimum(start + CHAIN, k)):
            a = tl.load(a_at, mask=row < m, other=0.0).to(tl.float32)
            b = tl.load(b_at, mask=col < n, other=0.0).to(tl.float32)
            part += a[:, None] * b[None, :]
            a_at += ak
            b_at += bk
        acc += part
    acc = finished(acc, bias_ptr, residual_ptr, batch, row, col, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
    mask = (row < m)[:, None] & (col < n)[None, :]
    tl.store(c_ptr + (batch * m + row[:, None]) * n + col[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _coalesced_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, am, ak, bk, bn, batch_a, batch_b,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK steps of k at a time: the lanes of a warp lie along k and read neighbours, so that whole sectors are used."""
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    col = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    step = tl.arange(0, BK)
    a_at = a_ptr + batch * batch_a + row[:, None] * am + step[None, :] * ak
    b_at = b_ptr + batch * batch_b + col[:, None] * bn + step[None, :].to(tl.int64) * bk
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        inside = (step < k - start)[None, :]
        a = tl.load(a_at, mask=(row < m)[:, None] & inside, other=0.0).to(tl.float32)
        b = tl.load(b_at, mask=(col < n)[:, None] & inside, other=0.0).to(tl.float32)
        acc += tl.sum(a[:, None, :] * b[None, :, :], axis=2)
        a_at += BK * ak
        b_at += BK * bk
    acc = finished(acc, bias_ptr, residual_ptr, batch, row, col, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
    mask = (row < m)[:, None] & (col < n)[None, :]
    tl.store(c_ptr + (batch * m + row[:, None]) * n + col[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


NAIVE = Kernel(jit=_naive_kernel, narrow="the first step: elements of a column are a row apart, and move one by one")
COALESCED = Kernel(jit=_coalesced_kernel, narrow="rows of odd width begin anywhere, so their elements move one by one")
