"""The norms of narrow rows: several share a program, so that its threads have enough to do.

Backward, a row stays within a warp, so that its sums wait for no other warp, and a thread adds up the weight's gradient
of its own columns over all the rows it sees: nothing leaves the thread before the last row is done. While one tile of
rows is worked on, the next is on its way into registers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sublight.backend.device import Facts, is_interpreted
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.op import Kernel
from sublight.ops.kernels.column_sums import add_to, shares_for
from sublight.ops.kernels.column_sums import sum_of as over_rows
from sublight.ops.kernels.rows import ODD_WIDTHS, aligned_as, block_for, sum_of
from sublight.ops.norm.parts import load_columns, reciprocal_root
from sublight.ops.record.tuning import Tile, planned, tile_for

BACKWARD_COLS = 512  # up to here a warp's registers hold a row, the next one and the sums
THREAD_BYTES = 16


@triton.jit
def _tile_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, rows, cols, x_stride, eps,
    CENTER: tl.constexpr, STATS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
    if CENTER:
        mean = tl.div_rn(tl.sum(x, 1), cols * 1.0)[:, None]
        if STATS:
            tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(mask, x - mean, 0.0)
    rstd = reciprocal_root(tl.sum(x * x, 1)[:, None], cols, eps)
    if STATS:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)
    if not EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
    y = x * rstd * w.to(tl.float32)
    if CENTER:
        y += b.to(tl.float32)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fetch(
    dy_ptr, x_ptr, sum_ptr, mean_ptr, rstd_ptr, row, col, rows, cols, dy_stride, x_stride, sum_stride,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """A tile of rows; zeros for those past the last."""
    mask = (row < rows) & (col < cols)
    place = row.to(tl.int64)  # rows * cols may pass 2**31
    dy = tl.load(dy_ptr + place * dy_stride + col, mask=mask, other=0.0)
    x = tl.load(x_ptr + place * x_stride + col, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
    mean, dsum = rstd, dy
    if CENTER:
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
    if RESIDUAL:
        dsum = tl.load(sum_ptr + place * sum_stride + col, mask=mask, other=0.0)
    return dy, x, dsum, mean, rstd


@triton.jit
def _row_sum(x, SUMS: tl.constexpr, CHUNKED: tl.constexpr):
    """Over the columns of each row: over the chunks of a thread where there are several, then across the lanes."""
    if CHUNKED:
        return sum_of(sum_of(x, 1, SUMS), 1, SUMS)[:, None, None]
    else:
        return sum_of(x, 2, SUMS)[:, :, None]


@triton.jit
def _column_sum(x, CHUNKED: tl.constexpr):
    """Over the rows that a thread has of a tile; there is one where a row is several chunks."""
    if CHUNKED:
        return x
    else:
        return tl.sum(x, 1)[:, None, :]


@triton.jit
def _finish(
    tile, w, dw, dw_rest, db, db_rest, dx_ptr, row, col, rows, cols,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, SUMS: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """dx of a tile of rows that has arrived, and what it adds to the sums."""
    dy, x, dsum, mean, rstd = tile
    EXACT: tl.constexpr = SUMS != "plain"
    g = dy.to(tl.float32) * w.to(tl.float32)
    centred = x.to(tl.float32)
    if CENTER:
        centred -= mean
    along = _row_sum(g * centred, SUMS, CHUNKED) * rstd / cols  # of the gradient, along the normalised row
    normal = centred * rstd
    dx = g - normal * along
    if CENTER:
        dx -= _row_sum(g, SUMS, CHUNKED) / cols
        db, db_rest = add_to(db, db_rest, _column_sum(dy.to(tl.float32), CHUNKED), EXACT)
    dw, dw_rest = add_to(dw, dw_rest, _column_sum(dy.to(tl.float32) * normal, CHUNKED), EXACT)
    dx *= rstd
    if RESIDUAL:
        dx += dsum.to(tl.float32)
    place = row.to(tl.int64) * cols + col  # rows * cols may pass 2**31
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=(row < rows) & (col < cols))
    return dw, dw_rest, db, db_rest


@triton.jit
def _tile_backward_kernel(
    dy_ptr, x_ptr, sum_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr,
    rows, cols, dy_stride, x_stride, sum_stride,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, SUMS: tl.constexpr,
    DEPTH: tl.constexpr, CHUNKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile is (ROWS, DEPTH, BLOCK). A thread has a place in the first and the last, and all of the middle one: chunks
    of a row, or rows. In this order, since Triton gives lanes and warps to the last dimension, then to the first.

    Two tiles take turns in registers of their own: one that were moved into the other's would be waited for first."""
    share = tl.program_id(0)
    near = tl.arange(0, ROWS)[:, None, None]
    depth = tl.arange(0, DEPTH)[None, :, None]
    lane = tl.arange(0, BLOCK)[None, None, :]
    STEP: tl.constexpr = ROWS if CHUNKED else ROWS * DEPTH
    row = share * STEP + near
    col = lane
    if CHUNKED:
        col = depth * BLOCK + lane
    else:
        row += depth * ROWS
    w = tl.load(w_ptr + aligned_as(cols) + col, mask=col < cols, other=0.0)
    dw = tl.zeros([ROWS, DEPTH if CHUNKED else 1, BLOCK], tl.float32)
    db = tl.zeros([ROWS, DEPTH if CHUNKED else 1, BLOCK], tl.float32)
    dw_rest, db_rest = dw, db  # what rounding took from these sums, of an fp32 result
    apart = tl.num_programs(0) * STEP
    one = _fetch(
        dy_ptr, x_ptr, sum_ptr, mean_ptr, rstd_ptr, row, col, rows, cols, dy_stride, x_stride, sum_stride,
        CENTER, RESIDUAL,
    )  # fmt: skip
    for _ in tl.range(share * STEP, rows, 2 * apart, num_stages=1):
        other = _fetch(
            dy_ptr, x_ptr, sum_ptr, mean_ptr, rstd_ptr, row + apart, col, rows, cols,
            dy_stride, x_stride, sum_stride, CENTER, RESIDUAL,
        )  # fmt: skip
        dw, dw_rest, db, db_rest = _finish(
            one, w, dw, dw_rest, db, db_rest, dx_ptr, row, col, rows, cols, CENTER, RESIDUAL, SUMS, CHUNKED
        )
        one = _fetch(
            dy_ptr, x_ptr, sum_ptr, mean_ptr, rstd_ptr, row + 2 * apart, col, rows, cols,
            dy_stride, x_stride, sum_stride, CENTER, RESIDUAL,
        )  # fmt: skip
        dw, dw_rest, db, db_rest = _finish(
            other, w, dw, dw_rest, db, db_rest, dx_ptr, row + apart, col, rows, cols,
            CENTER, RESIDUAL, SUMS, CHUNKED,
        )  # fmt: skip
        row += 2 * apart
    place = tl.arange(0, BLOCK)[None, :]
    if CHUNKED:
        place += tl.arange(0, DEPTH)[:, None] * BLOCK
    mine = share.to(tl.int64) * cols + place
    EXACT: tl.constexpr = SUMS != "plain"
    tl.store(dw_ptr + mine, over_rows(dw, dw_rest, EXACT).to(dw_ptr.dtype.element_ty), mask=place < cols)
    if CENTER:
        tl.store(db_ptr + mine, over_rows(db, db_rest, EXACT).to(db_ptr.dtype.element_ty), mask=place < cols)


@planned
def tile_of_backward(name: str, cols: int, itemsize: int, gpu: Facts, *, whole: bool) -> Tile:
    """`block` columns are what a warp has side by side, of one row or of several; `stages` rows are a thread's."""
    vector = THREAD_BYTES // itemsize if whole else 1  # lanes side by side where rows begin anywhere
    block = min(block_for(cols), 32 * vector)
    warps, depth = 8, 2 if block_for(cols) == block and itemsize == 2 else 1
    if is_interpreted():
        return Tile(block=block, rows=2 * depth, warps=4, programs=1, stages=depth)
    rows = warps * 32 * vector // block * depth
    rule = Tile(block=block, rows=rows, warps=warps, programs=2, registers=128, stages=depth)
    if itemsize == 4:  # sums that keep what rounding takes from them
        rule = replace(rule, rows=rows // 2, warps=4, registers=255)
    elif name == "add_layer_norm_backward":  # a third stream and a second sum
        rule = replace(rule, rows=rows // 2, warps=4, programs=3, registers=168)
    return tile_for(name, cols, itemsize, packable=whole, capability=gpu.capability, rule=rule)


def shares(rows: int, tile: Tile, gpu: Facts) -> int:
    """The number of shares of the weight's gradient that the launch leaves."""
    tiles = cdiv(rows, tile.rows)
    return min(tiles, shares_for(rows, tile.programs * gpu.multiprocessors, gpu.multiprocessors))


def step_backward(
    rows: int,
    cols: int,
    strides: tuple[int, int, int],
    tile: Tile,
    gpu: Facts,
    *,
    on: str,
    center: bool,
    residual: bool = False,
    sums: str = "plain",
) -> Step:
    """The launch; `strides` are those of dy, x and the residual's gradient."""
    chunks = block_for(cols) // tile.block
    is_chunked = chunks > 1
    sizes = {"DEPTH": chunks if is_chunked else tile.stages, "CHUNKED": is_chunked, "ROWS": tile.rows // tile.stages}
    kind: dict[str, Any] = {"CENTER": center, "RESIDUAL": residual, "SUMS": sums, "BLOCK": tile.block}
    if center and cols == 1:  # dy * w less itself is zero, as PyTorch has it; fused, it is the product's rounding error
        kind["enable_fp_fusion"] = False
    grid = (shares(rows, tile, gpu),)
    return Step(_tile_backward_kernel, grid, rows, cols, *strides, on=on, tile=tile, **kind, **sizes, **tile.options())


KERNEL = Kernel(jit=_tile_kernel, narrow=ODD_WIDTHS)
BACKWARD_KERNEL = Kernel(
    jit=_tile_backward_kernel,
    narrow=ODD_WIDTHS,
    spills="8 to 32 bytes at 128 columns: 128 registers let two programs share a multiprocessor; others are not timed",
)
