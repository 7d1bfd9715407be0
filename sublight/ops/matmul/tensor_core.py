"""A tile of C at a time: blocks of A and B come through shared memory, and tensor cores multiply them.

One function is four steps of the ladder. `tiled` computes in fp32 with plain multiply-adds: shared memory brings each
element in once a tile instead of once a row. `tensor_core` leaves 16-bit operands to the tensor cores. `swizzled` takes
the tiles in groups (`order.py`), so that programs that run at once share operands in the L2. `persistent`, where
Hopper's copy engine cannot be had, keeps as many programs as the GPU runs at once, each on one tile after the other.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.epilogue import finished
from sublight.ops.matmul.order import add_product, tile_of, whole_sum


@triton.jit
def _one_tile(
    program, batch, a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, am, ak, bk, bn, batch_a, batch_b,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, IN_FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(program, tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    batch = batch.to(tl.int64)
    row = tile_m.to(tl.int64) * BM + tl.arange(0, BM)  # row * am may pass 2**31
    col = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    step = tl.arange(0, BK).to(tl.int64)
    a_at = a_ptr + batch * batch_a + row[:, None] * am + step[None, :] * ak
    b_at = b_ptr + batch * batch_b + step[:, None] * bk + col[None, :] * bn
    acc = tl.zeros([BM, BN], tl.float32)
    lost = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        if EVEN:  # k is whole blocks: only the edges of C are cut off
            a = tl.load(a_at, mask=(row < m)[:, None], other=0.0)
            b = tl.load(b_at, mask=(col < n)[None, :], other=0.0)
        else:
            a = tl.load(a_at, mask=(row < m)[:, None] & (step < k - start)[None, :], other=0.0)
            b = tl.load(b_at, mask=(col < n)[None, :] & (step < k - start)[:, None], other=0.0)
        if IN_FP32:  # plain multiply-adds: what a product costs without tensor cores
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc, lost = add_product(acc, lost, a, b, PRECISION)
        a_at += BK * ak
        b_at += BK * bk
    acc = whole_sum(acc, lost, PRECISION)
    acc = finished(acc, bias_ptr, residual_ptr, batch, row, col, m, n, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)
    mask = (row < m)[:, None] & (col < n)[None, :]
    tl.store(c_ptr + (batch * m + row[:, None]) * n + col[None, :], acc.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, am, ak, bk, bn, batch_a, batch_b,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, IN_FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a tile."""
    _one_tile(
        tl.program_id(0), tl.program_id(1), a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, am, ak, bk, bn,
        batch_a, batch_b, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, BM, BN, BK, GROUP, EVEN, IN_FP32, PRECISION,
    )  # fmt: skip


@triton.jit
def _every_tile_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, am, ak, bk, bn, batch_a, batch_b, batches,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, IN_FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As many programs as there are places for; each takes one tile after the other."""
    tiles = tl.cdiv(m, BM) * tl.cdiv(n, BN)
    for program in range(tl.program_id(0), tiles * batches, tl.num_programs(0)):
        _one_tile(
            program % tiles, program // tiles, a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, am, ak, bk, bn,
            batch_a, batch_b, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, BM, BN, BK, GROUP, EVEN, IN_FP32, PRECISION,
        )  # fmt: skip


_ODD = "rows of odd width begin anywhere, so their elements move one by one"
TILE = Kernel(jit=_tile_kernel, narrow=_ODD)
EVERY_TILE = Kernel(
    jit=_every_tile_kernel, narrow=_ODD, spills="in fp32 two numbers, once a block of k: what sums have lost takes room"
)
