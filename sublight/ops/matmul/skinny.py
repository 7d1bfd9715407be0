"""Products of few rows, as decoding has them: every weight is read for a handful of multiply-adds, so memory decides.

Of one row no tensor core is needed: a program streams some rows of the weight (n, k) and adds up along k. Of up to 64
rows the weight's rows are the tall side of the tensor cores' tile, and the few rows of A the narrow one. Few tiles
would leave multiprocessors without work: then k is split, each program writes its part of the sums, and a second launch
adds the parts in their order, so that the result is the same every time. Where that need not be, programs add their
parts to the sums as they come (ATOMIC): less is written and read, and the last bits differ from run to run.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.epilogue import finished
from sublight.ops.matmul.order import add_product, whole_sum

MOST_ROWS = 64


@triton.jit
def _row_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, n, k, bn,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One row of A, which lies in one piece, against BN columns of B, which lie along k.

    Neighbours along k that a thread loads at once it adds up at once: with a sum for each, a program takes twice the
    registers, half as many fit, and fewer loads are under way.
    """
    WIDE: tl.constexpr = 128 // b_ptr.dtype.element_ty.primitive_bitwidth
    TOGETHER: tl.constexpr = WIDE if BK >= WIDE else BK
    col = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    step = tl.arange(0, BK)
    b_at = b_ptr + col[:, None] * bn + step[None, :]
    acc = tl.zeros([BN, BK // TOGETHER], tl.float32)
    for start in range(0, k, BK):
        if EVEN:  # n and k are whole blocks
            a = tl.load(a_ptr + start + step)
            b = tl.load(b_at + start, eviction_policy="evict_first")
        else:
            inside = step < k - start
            a = tl.load(a_ptr + start + step, mask=inside, other=0.0)
            b = tl.load(
                b_at + start, mask=(col < n)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first"
            )
        acc += tl.sum((b.to(tl.float32) * a.to(tl.float32)[None, :]).reshape(BN, BK // TOGETHER, TOGETHER), 2)
    row = tl.zeros([1], tl.int64)
    sums = tl.sum(acc, axis=1)[None, :]
    sums = finished(sums, bias_ptr, residual_ptr, 0, row, col, 1, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
    tl.store(c_ptr + col[None, :], sums.to(c_ptr.dtype.element_ty), mask=(col < n)[None, :])


@triton.jit
def _rows_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, am, ak, bk, bn, per_split,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, IS_PART: tl.constexpr, ATOMIC: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All rows of A against BN columns of B, over a part of k: the sums, or with IS_PART a part of them, in fp32."""
    col = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    row = tl.arange(0, BM).to(tl.int64)
    begin = tl.program_id(1) * per_split
    end = tl.minimum(k, begin + per_split)
    step = begin + tl.arange(0, BK).to(tl.int64)
    a_at = a_ptr + row[None, :] * am + step[:, None] * ak  # (BK, BM): turned
    b_at = b_ptr + col[:, None] * bn + step[None, :] * bk
    acc = tl.zeros([BN, BM], tl.float32)
    lost = tl.zeros([BN, BM], tl.float32)
    for start in range(begin, end, BK):
        if EVEN:
            a = tl.load(a_at, mask=(row < m)[None, :], other=0.0)
            b = tl.load(b_at, mask=(col < n)[:, None], other=0.0)
        else:
            inside = tl.arange(0, BK) < end - start
            a = tl.load(a_at, mask=(row < m)[None, :] & inside[:, None], other=0.0)
            b = tl.load(b_at, mask=(col < n)[:, None] & inside[None, :], other=0.0)
        acc, lost = add_product(acc, lost, b, a, PRECISION)
        a_at += BK * ak
        b_at += BK * bk
    sums = tl.trans(whole_sum(acc, lost, PRECISION))
    mask = (row < m)[:, None] & (col < n)[None, :]
    if not IS_PART:
        sums = finished(sums, bias_ptr, residual_ptr, 0, row, col, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
        tl.store(c_ptr + row[:, None] * n + col[None, :], sums.to(c_ptr.dtype.element_ty), mask=mask)
    elif ATOMIC:
        tl.atomic_add(c_ptr + row[:, None] * n + col[None, :], sums, mask=mask, sem="relaxed")
    else:
        part = tl.program_id(1).to(tl.int64)
        tl.store(c_ptr + (part * m + row[:, None]) * n + col[None, :], sums, mask=mask)


@triton.jit
def _add_parts_kernel(
    parts_ptr, bias_ptr, residual_ptr, c_ptr, m, n, parts,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The parts of a row's sums, added in their order."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    col = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (col < n)[None, :]
    acc = tl.zeros([1, BLOCK], tl.float32)
    for part in range(parts):
        acc += tl.load(parts_ptr + (part * m + row[:, None]) * n + col[None, :], mask=mask, other=0.0)
    acc = finished(acc, bias_ptr, residual_ptr, 0, row, col, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
    tl.store(c_ptr + row[:, None] * n + col[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


_ODD = "rows of odd width begin anywhere, so their elements move one by one"
ROW = Kernel(jit=_row_kernel, narrow=_ODD)
ROWS = Kernel(jit=_rows_kernel, narrow=_ODD)
ADD_PARTS = Kernel(jit=_add_parts_kernel, narrow=_ODD)
