"""The backward pass of add_norm where no multiprocessor holds a row: in chunks, read twice, then mostly from the L2."""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.ops.kernels.rows import aligned_as, sum_of


@triton.jit
def _row_gradient(
    dy_ptr, dsum_ptr, sum_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, row, cols, dy_stride, dsum_stride,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """dx of one row, in chunks, twice."""
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if CENTER:
        mean = tl.load(mean_ptr + row)
    along = tl.zeros([BLOCK], tl.float32)
    offset = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK)
        h = tl.load(sum_ptr + row * cols + col, mask=col < cols, other=0.0, eviction_policy="evict_last")
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_last")
        w = tl.load(w_ptr + aligned_as(cols) + col, mask=col < cols, other=0.0)
        g = dy.to(tl.float32) * w.to(tl.float32)
        along += g * (h.to(tl.float32) - mean)
        offset += g
    along_row = sum_of(along, 0, SUMS) * rstd / cols
    offset_row = 0.0
    if CENTER:
        offset_row = sum_of(offset, 0, SUMS) / cols
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK)
        h = tl.load(sum_ptr + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0).to(tl.float32)
        g = dy * tl.load(w_ptr + aligned_as(cols) + col, mask=col < cols, other=0.0).to(tl.float32)
        dx = (g - (h - mean) * rstd * along_row - offset_row) * rstd
        if RESIDUAL:
            dsum_place = dsum_ptr + row * dsum_stride + col
            dx += tl.load(dsum_place, mask=col < cols, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _column_share(
    dy_ptr, sum_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, share, first_row, last_row, first_col, cols, dy_stride,
    CENTER: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The weight's gradient of some columns, over a run of rows."""
    place = first_col + tl.arange(0, COLS)
    col = place[None, :]
    dw = tl.zeros([ROWS, COLS], tl.float32)
    db = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.range(first_row, last_row, ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        mask = (row < last_row) & (col < cols)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(sum_ptr + row * cols + col, mask=mask, other=0.0).to(tl.float32)
        if CENTER:
            h -= tl.load(mean_ptr + row, mask=row < last_row, other=0.0)
            db += dy
        dw += dy * (h * tl.load(rstd_ptr + row, mask=row < last_row, other=0.0))
    dw_place = dw_ptr + share.to(tl.int64) * cols + place
    tl.store(dw_place, tl.sum(dw, 0).to(dw_ptr.dtype.element_ty), mask=place < cols)
    if CENTER:
        db_place = db_ptr + share.to(tl.int64) * cols + place
        tl.store(db_place, tl.sum(db, 0).to(db_ptr.dtype.element_ty), mask=place < cols)


@triton.jit
def _wide_backward_kernel(
    dy_ptr, dsum_ptr, sum_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows, cols, dy_stride, dsum_stride,
    group, programs,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """For rows that are too wide to be held: a group's rows, then its columns, by neighbouring programs.

    Neither needs the other's result: they only stand side by side so that the second finds the rows in the L2.
    """
    share = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    first_row = share * group
    last_row = tl.minimum(rows, first_row + group)
    if part >= group:
        _column_share(
            dy_ptr, sum_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, share, first_row, last_row, (part - group) * COLS,
            cols, dy_stride, CENTER, STAGES, ROWS, COLS,
        )  # fmt: skip
    elif first_row + part < last_row:
        _row_gradient(
            dy_ptr, dsum_ptr, sum_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, (first_row + part).to(tl.int64), cols,
            dy_stride, dsum_stride, CENTER, RESIDUAL, BLOCK, STAGES, SUMS,
        )  # fmt: skip
