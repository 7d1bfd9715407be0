"""Kernels of grouped products: rows of A in consecutive groups, each with a weight of its own.

How many rows each group has is known on the device alone (a router decided it), so the number of tiles is not known
when the launch is made. A fixed number of programs therefore walks over all groups, counts their tiles, and takes every
so-manieth of them; `ends` is read from the cache, a few cycles a group.

Rows may also be taken through an index: a mixture of experts reads its tokens where they lie, row r of a group being
row `index[r] // share` of the tensor, and never writes them in the groups' order.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.order import add_product, whole_sum


@triton.jit
def _grouped_kernel(
    a_ptr, b_ptr, ends_ptr, index_ptr, c_ptr, m, n, k, groups, share, am, ak, bg, bk, bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, INDEXED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """C's rows of a group are A's, or those that the index names, times the group's matrix (k, n)."""
    across = tl.cdiv(n, BN)
    tile = tl.program_id(0)
    before = 0  # tiles of the groups so far
    begin = 0
    matrix = b_ptr  # of the group
    for group in range(groups):
        end = tl.maximum(begin, tl.minimum(tl.load(ends_ptr + group), m).to(tl.int32))  # never outside of A
        tiles = tl.cdiv(end - begin, BM) * across
        while tile < before + tiles:
            place = tile - before
            # all rows of a group before its next columns: its weight is read once, while it is in the cache
            down = tl.cdiv(end - begin, BM)
            row = (begin + (place % down) * BM + tl.arange(0, BM)).to(tl.int64)
            col = ((place // down) * BN + tl.arange(0, BN)).to(tl.int64)
            step = tl.arange(0, BK).to(tl.int64)
            if INDEXED:
                place_a = (tl.load(index_ptr + row, mask=row < end, other=0) // share).to(tl.int64)
            else:
                place_a = row
            a_at = a_ptr + place_a[:, None] * am + step[None, :] * ak
            b_at = matrix + step[:, None] * bk + col[None, :] * bn
            acc = tl.zeros([BM, BN], tl.float32)
            lost = tl.zeros([BM, BN], tl.float32)
            for start in range(0, k, BK):
                if EVEN:
                    a = tl.load(a_at, mask=(row < end)[:, None], other=0.0)
                    b = tl.load(b_at, mask=(col < n)[None, :], other=0.0)
                else:
                    a = tl.load(a_at, mask=(row < end)[:, None] & (step < k - start)[None, :], other=0.0)
                    b = tl.load(b_at, mask=(col < n)[None, :] & (step < k - start)[:, None], other=0.0)
                acc, lost = add_product(acc, lost, a, b, PRECISION)
                a_at += BK * ak
                b_at += BK * bk
            mask = (row < end)[:, None] & (col < n)[None, :]
            acc = whole_sum(acc, lost, PRECISION)
            tl.store(c_ptr + row[:, None] * n + col[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)
            tile += tl.num_programs(0)
        before += tiles
        begin = end
        matrix += bg


@triton.jit
def _grouped_engine_kernel(
    a_ptr, b_desc, ends_ptr, index_ptr, c_ptr, hidden_ptr, m, n, k, groups, share, am,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, INDEXED: tl.constexpr,
    B_TURNED: tl.constexpr, GATED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The same on Hopper, whose copy engine loads the matrices: all groups' rows, one below the other.

    GATED: each group's matrix is two, gate above up (2 * n columns of its product), and C is silu(gate) * up: both
    products' tiles are in registers at once, so what they are made of goes to memory only where it is KEPT.
    """
    across = tl.cdiv(n, BN)
    tile = tl.program_id(0)
    before = 0  # tiles of the groups so far
    begin = 0
    step = tl.arange(0, BK)
    for group in range(groups):
        end = tl.maximum(begin, tl.minimum(tl.load(ends_ptr + group), m).to(tl.int32))  # never outside of A
        down = tl.cdiv(end - begin, BM)
        while tile < before + down * across:
            place = tile - before
            row = begin + (place % down) * BM + tl.arange(0, BM)
            first_col = (place // down) * BN
            if INDEXED:
                place_a = (tl.load(index_ptr + row, mask=row < end, other=0) // share).to(tl.int64)
            else:
                place_a = row.to(tl.int64)
            a_at = a_ptr + place_a[:, None] * am + step[None, :]
            acc = tl.zeros([BM, BN], tl.float32)
            up = tl.zeros([BM, BN], tl.float32)
            for start in range(0, k, BK):
                if EVEN:
                    a = tl.load(a_at, mask=(row < end)[:, None], other=0.0)
                else:
                    a = tl.load(a_at, mask=(row < end)[:, None] & (step < k - start)[None, :], other=0.0)
                if GATED:
                    acc = tl.dot(a, b_desc.load([group * 2 * n + first_col, start]).T, acc)
                    up = tl.dot(a, b_desc.load([(group * 2 + 1) * n + first_col, start]).T, up)
                elif B_TURNED:  # (n, k) in memory
                    acc = tl.dot(a, b_desc.load([group * n + first_col, start]).T, acc)
                else:
                    acc = tl.dot(a, b_desc.load([group * k + start, first_col]), acc)
                a_at += BK
            col = first_col + tl.arange(0, BN)
            at = row.to(tl.int64)[:, None]
            mask = (row < end)[:, None] & (col < n)[None, :]
            if GATED:
                # as rounded as what the backward pass reads
                gate, up = acc.to(c_ptr.dtype.element_ty), up.to(c_ptr.dtype.element_ty)
                if KEPT:
                    tl.store(hidden_ptr + at * 2 * n + col[None, :], gate, mask=mask)
                    tl.store(hidden_ptr + (at * 2 + 1) * n + col[None, :], up, mask=mask)
                acc = gate.to(tl.float32)
                acc = acc / (1.0 + tl.exp(-acc)) * up.to(tl.float32)
            tl.store(c_ptr + at * n + col[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)
            tile += tl.num_programs(0)
        before += down * across
        begin = end


@triton.jit
def _grouped_weights_kernel(
    a_ptr, dc_ptr, ends_ptr, index_ptr, db_ptr, m, n, k, groups, share, am, ak, dcm, dcn,
    BK: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, INDEXED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of each group's matrix (k, n): its rows of A, turned, times its rows of dC; zeros without rows.

    INDEXED is "a" or "dc", whose rows the index names, or "" for neither.
    """
    down, across = tl.cdiv(k, BK), tl.cdiv(n, BN)
    for tile in range(tl.program_id(0), groups * down * across, tl.num_programs(0)):
        group = (tile // (down * across)).to(tl.int64)
        place = tile % (down * across)
        begin = tl.maximum(tl.load(ends_ptr + group - 1, mask=group > 0, other=0), 0).to(tl.int64)
        end = tl.minimum(tl.load(ends_ptr + group), m).to(tl.int64)  # never outside of A
        at_k = ((place % down) * BK + tl.arange(0, BK)).to(tl.int64)
        col = ((place // down) * BN + tl.arange(0, BN)).to(tl.int64)
        acc = tl.zeros([BK, BN], tl.float32)
        lost = tl.zeros([BK, BN], tl.float32)
        for start in range(begin, end, BR):
            row = start + tl.arange(0, BR)
            row_a, row_dc = row, row
            if INDEXED != "":
                named = (tl.load(index_ptr + row, mask=row < end, other=0) // share).to(tl.int64)
                if INDEXED == "a":
                    row_a = named
                else:
                    row_dc = named
            a = tl.load(
                a_ptr + at_k[:, None] * ak + row_a[None, :] * am,
                mask=(at_k < k)[:, None] & (row < end)[None, :],
                other=0.0,
            )
            dc = tl.load(
                dc_ptr + row_dc[:, None] * dcm + col[None, :] * dcn,
                mask=(row < end)[:, None] & (col < n)[None, :],
                other=0.0,
            )
            acc, lost = add_product(acc, lost, a, dc, PRECISION)
        mask = (at_k < k)[:, None] & (col < n)[None, :]
        at = db_ptr + (group * k + at_k[:, None]) * n + col[None, :]
        acc = whole_sum(acc, lost, PRECISION)
        tl.store(at, acc.to(db_ptr.dtype.element_ty), mask=mask)


_ODD = "rows of odd width begin anywhere, so their elements move one by one"
GROUPED = Kernel(
    jit=_grouped_kernel, narrow=_ODD, spills="in fp32 two numbers, once a block of k: what sums have lost takes room"
)
GROUPED_ENGINE = Kernel(jit=_grouped_engine_kernel, targets=(90,), narrow=_ODD)
GROUPED_WEIGHTS = Kernel(jit=_grouped_weights_kernel, narrow=_ODD)
