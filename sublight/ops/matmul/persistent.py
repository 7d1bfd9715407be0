"""Persistent programs on Hopper: the copy engine brings tiles of A and B in, wgmma multiplies, one flat loop over all.

One program a multiprocessor takes tile after tile, so that the loads of the next tile are on their way while the last
one is stored: a launch of one program a tile starts each with nothing in shared memory. The copy engine (TMA) takes a
tile's corner from a descriptor and cuts off what lies outside. An operand may lie either way round: its descriptor is
over the dimension that is contiguous, and the tile is turned on its way into wgmma.

The copy engine needs rows that begin at multiples of 16 bytes. Where an operand's do not (k = 700), it is copied into
rows that do: for a product of any size the copy costs little, since each element is used thousands of times.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.matmul.epilogue import store_finished
from sublight.ops.matmul.order import tile_of


@triton.jit
def _persistent_kernel(
    a_desc, b_desc, c_desc, bias_ptr, residual_ptr, c_ptr, scale_a_ptr, scale_b_ptr, m, n, k,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
    BY_ENGINE: tl.constexpr, SCALED: tl.constexpr, C_COLS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLAT):
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
        store_finished(
            acc, first_row, first_col, c_desc, bias_ptr, residual_ptr, c_ptr, scale_a_ptr, scale_b_ptr, m, n,
            HAS_BIAS, HAS_RESIDUAL, ACTIVATION, BY_ENGINE, SCALED, C_COLS,
        )  # fmt: skip


@triton.jit
def _align_kernel(
    x_ptr, y_ptr, rows, units, x_units, y_units, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Rows of `units` pieces into rows that are `y_units` pieces apart; a piece of UNIT elements moves as one."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (row < rows)[:, None] & (col < units * UNIT)[None, :]
    x = tl.load(x_ptr + row[:, None] * (x_units * UNIT) + col[None, :], mask=mask)
    tl.store(y_ptr + row[:, None] * (y_units * UNIT) + col[None, :], x, mask=mask)


PERSISTENT = Kernel(jit=_persistent_kernel, targets=(90,), narrow="where C's rows begin anywhere, it is stored so")
ALIGN = Kernel(jit=_align_kernel, narrow="what it is for: rows that begin anywhere")
