"""Products of fp8 codes on Hopper whose sums are kept in fp32: the tensor cores' own have some 14 bits.

Of each 128 along k the tensor cores add up what they multiply, and the sum goes into fp32 by plain additions. That is
also where scales of blocks come in: each 128 of a row of A has one, and each 128 of a column of B, or each 128 x 128
block of it. Two sums a thread take twice the registers, so tiles are half as large as `persistent.py`'s.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.epilogue import finished, scaled, store_finished
from sublight.ops.matmul.order import tile_of

BLOCK = 128  # of k, that share a scale
BLOCK_COLS = tl.constexpr(128)


@triton.jit
def _promoted_kernel(
    a_desc, b_desc, c_desc, bias_ptr, c_ptr, scale_a_ptr, scale_b_ptr, m, n, k, sam, sak, sbk, sbn,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, BY_ENGINE: tl.constexpr, C_COLS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """SCALED is "tensor" or "row", or "columns" or "blocks" for what has a scale of each 128 of B."""
    down, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLAT):
        tile_m, tile_n = tile_of(tile, down, across, GROUP)
        first_row, first_col = tile_m * BM, tile_n * BN
        row = first_row.to(tl.int64) + tl.arange(0, BM)
        col = first_col + tl.arange(0, BN)
        acc = tl.zeros([BM, BN], tl.float32)
        for step in range(tl.cdiv(k, BK)):
            a = a_desc.load([first_row, step * BK])
            b = b_desc.load([first_col, step * BK])
            part = tl.dot(a, b.T)  # of codes, Triton does not make one chain of this and what follows
            if SCALED == "columns":
                of_row = tl.load(scale_a_ptr + row * sam + step * sak, mask=row < m, other=0.0)
                of_col = tl.load(scale_b_ptr + col * sbn + step * sbk, mask=col < n, other=0.0)
                acc += part * of_row[:, None] * of_col[None, :]
            elif SCALED == "blocks":  # BN is one block
                of_row = tl.load(scale_a_ptr + row * sam + step * sak, mask=row < m, other=0.0)
                acc += part * (of_row * tl.load(scale_b_ptr + tile_n * sbn + step * sbk))[:, None]
            else:
                acc += part
        AFTER: tl.constexpr = SCALED if SCALED == "tensor" or SCALED == "row" else ""
        store_finished(
            acc, first_row, first_col, c_desc, bias_ptr, bias_ptr, c_ptr, scale_a_ptr, scale_b_ptr, m, n,
            HAS_BIAS, False, "none", BY_ENGINE, AFTER, C_COLS,
        )  # fmt: skip


@triton.jit
def _codes_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr, scale_a_ptr, scale_b_ptr, m, n, k, am, ak, bk, bn, sam, sak, sbk, sbn,
    HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The same by pointers, one program a tile: for GPUs without Hopper's copy engine."""
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    row = tile_m.to(tl.int64) * BM + tl.arange(0, BM)
    col = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    inside = tl.arange(0, BK).to(tl.int64)
    a_at = a_ptr + row[:, None] * am + inside[None, :] * ak
    b_at = b_ptr + inside[:, None] * bk + col[None, :] * bn
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(tl.cdiv(k, BK)):
        a = tl.load(a_at, mask=(row < m)[:, None] & (inside < k - step * BK)[None, :], other=0.0)
        b = tl.load(b_at, mask=(col < n)[None, :] & (inside < k - step * BK)[:, None], other=0.0)
        part = tl.dot(a, b)
        if SCALED == "columns":
            of_row = tl.load(scale_a_ptr + row * sam + step * sak, mask=row < m, other=0.0)
            of_col = tl.load(scale_b_ptr + col * sbn + step * sbk, mask=col < n, other=0.0)
            acc += part * of_row[:, None] * of_col[None, :]
        elif SCALED == "blocks":
            of_row = tl.load(scale_a_ptr + row * sam + step * sak, mask=row < m, other=0.0)
            of_col = tl.load(scale_b_ptr + col // BLOCK_COLS * sbn + step * sbk, mask=col < n, other=0.0)
            acc += part * of_row[:, None] * of_col[None, :]
        else:
            acc += part
        a_at += BK * ak
        b_at += BK * bk
    AFTER: tl.constexpr = SCALED if SCALED == "tensor" or SCALED == "row" else ""
    acc = scaled(acc, scale_a_ptr, scale_b_ptr, row, col, m, n, AFTER)
    acc = finished(acc, bias_ptr, bias_ptr, 0, row, col, m, n, HAS_BIAS, False, "none")
    mask = (row < m)[:, None] & (col < n)[None, :]
    tl.store(c_ptr + row[:, None] * n + col[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


PROMOTED = Kernel(jit=_promoted_kernel, targets=(90,), narrow="where C's rows begin anywhere, it is stored so")
CODES = Kernel(
    jit=_codes_kernel,
    targets=(90, 100, 120),
    narrow="rows of odd width begin anywhere: their elements move one by one",
    spills="rows of odd width: an address for each element, beside two sums (sm_90, sm_100 64 bytes, sm_120 to 1,648)",
)
