"""A tile of C by tensor cores: blocks of A and B through shared memory, many multiply-adds an instruction.

The same kernel is three steps of the ladder. `tiled` computes in fp32 with plain multiply-adds: shared memory brings
each element in once a tile instead of once a row. `tensor_core` leaves 16-bit operands to the tensor cores. `swizzled` takes
the tiles in groups (`order.py`), so that programs that run at once share operands in the L2.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.epilogue import finished
from sublight.ops.matmul.order import tile_of


@triton.jit
def _tile_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, m, n, k, am, ak, bk, bn, batch_a, batch_b, residual_stride, scale,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, ACTIVATION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    tile_m, tile_n = tile_of(tl.program_id(0), down, across, GROUP)
    batch = tl.program_id(1).to(tl.int64)
    row = tile_m.to(tl.int64) * BM + tl.arange(0, BM)  # m * am may pass 2**31
    col = tile_n * BN + tl.arange(0, BN)
    step = tl.arange(0, BK)
    a_at = a_ptr + batch * batch_a + row[:, None] * am + step[None, :] * ak
    b_at = b_ptr + batch * batch_b + step[:, None].to(tl.int64) * bk + col[None, :].to(tl.int64) * bn
    acc = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, k, BK):
        left = k - start
        if EVEN:  # k is whole blocks: only the edges of C are cut off
            a = tl.load(a_at, mask=(row < m)[:, None], other=0.0)
            b = tl.load(b_at, mask=(col < n)[None, :], other=0.0)
        else:
            a = tl.load(a_at, mask=(row < m)[:, None] & (step < left)[None, :], other=0.0)
            b = tl.load(b_at, mask=(col < n)[None, :] & (step < left)[:, None], other=0.0)
        if WIDE:  # plain multiply-adds: what a product costs without tensor cores
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_at += BK * ak
        b_at += BK * bk
    acc = finished(
        acc, bias_ptr, residual_ptr, row, col, m, n, residual_stride, scale,
        HAS_BIAS, HAS_RESIDUAL, HAS_SCALE, ACTIVATION,
    )  # fmt: skip
    mask = (row < m)[:, None] & (col < n)[None, :]
    c_at = c_ptr + batch * m * n + row[:, None] * n + col[None, :]
    tl.store(c_at, acc.to(c_ptr.dtype.element_ty), mask=mask)


KERNEL = Kernel(jit=_tile_kernel, narrow="rows of odd width begin anywhere, so their elements move one by one")
