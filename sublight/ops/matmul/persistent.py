"""Persistent programs on Hopper: the copy engine brings tiles of A and B in, wgmma multiplies, one flat loop over all.

One program a multiprocessor takes tile after tile, so that the loads of the next tile are on their way while the last
one is stored: a launch of one program a tile starts each with empty hands. The copy engine (TMA) takes a tile's corner
from a descriptor and cuts off what lies outside; it needs rows that begin at multiples of 16 bytes. An operand may lie either
way round: its descriptor is over the dimension that is contiguous, and the tile is turned on its way into wgmma.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.epilogue import finished
from sublight.ops.matmul.order import tile_of


@triton.jit
def _persistent_kernel(
    a_desc, b_desc, c_desc, bias_ptr, residual_ptr, m, n, k, residual_stride, scale,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SCALE: tl.constexpr, ACTIVATION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, FLAT: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=FLAT):
        tile_m, tile_n = tile_of(tile, down, across, GROUP)
        first_row, first_col = tile_m * BM, tile_n * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for step in range(tl.cdiv(k, BK)):
            if A_TURNED:  # (k, m) in memory
                a = a_desc.load([step * BK, first_row]).T
            else:
                a = a_desc.load([first_row, step * BK])
            if B_TURNED:  # (n, k) in memory
                b = b_desc.load([first_col, step * BK]).T
            else:
                b = b_desc.load([step * BK, first_col])
            acc = tl.dot(a, b, acc)
        row = first_row.to(tl.int64) + tl.arange(0, BM)
        # in two halves: the whole tile would need twice the shared memory on its way out
        left, right = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN // 2]), (0, 2, 1)))
        col = first_col + tl.arange(0, BN // 2)
        left = finished(
            left, bias_ptr, residual_ptr, row, col, m, n, residual_stride, scale,
            HAS_BIAS, HAS_RESIDUAL, HAS_SCALE, ACTIVATION,
        )  # fmt: skip
        c_desc.store([first_row, first_col], left.to(OUT))
        right = finished(
            right, bias_ptr, residual_ptr, row, col + BN // 2, m, n, residual_stride, scale,
            HAS_BIAS, HAS_RESIDUAL, HAS_SCALE, ACTIVATION,
        )  # fmt: skip
        c_desc.store([first_row, first_col + BN // 2], right.to(OUT))


KERNEL = Kernel(jit=_persistent_kernel, targets=(90,))
