"""The norms of rows that no multiprocessor holds: in chunks, read twice, the second time mostly out of the L2."""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.kernels.rows import ODD_WIDTHS, aligned_as
from sublight.ops.norm.parts import load_columns, reciprocal_root

STREAM_BLOCK = 8192  # columns of a chunk


@triton.jit
def _stream_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    cols,
    x_stride,
    eps,
    CENTER: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mean, squares, count = 0.0, 0.0, 0.0
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        size = tl.minimum(cols - start, BLOCK).to(tl.float32)
        if CENTER:  # chunks merge by their means and squared deviations, so that a large mean costs no digits
            chunk_mean = tl.sum(x, 0) / size
            deviation = tl.where(mask, x - chunk_mean, 0.0)
            shift = chunk_mean - mean
            squares += tl.sum(deviation * deviation, 0) + shift * shift * count * size / (count + size)
            mean += shift * size / (count + size)
            count += size
        else:
            squares += tl.sum(x * x, 0)
    rstd = reciprocal_root(squares, cols, eps)
    if CENTER and STATS:
        tl.store(mean_ptr + row, mean)
    if STATS:
        tl.store(rstd_ptr + row, rstd)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
        y = (x - mean) * rstd * w.to(tl.float32)
        if CENTER:
            y += b.to(tl.float32)
        tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _stream_backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, cols, dy_stride, x_stride,
    CENTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if CENTER:
        mean = tl.load(mean_ptr + row)
    along = tl.zeros([BLOCK], tl.float32)
    offset = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_last")
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_last")
        w = tl.load(w_ptr + aligned_as(cols) + col, mask=col < cols, other=0.0)
        g = dy.to(tl.float32) * w.to(tl.float32)
        along += g * (x.to(tl.float32) - mean)
        offset += g
    along_row = tl.sum(along, 0) * rstd / cols
    offset_row = 0.0
    if CENTER:
        offset_row = tl.sum(offset, 0) / cols
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0).to(tl.float32)
        g = dy * tl.load(w_ptr + aligned_as(cols) + col, mask=col < cols, other=0.0).to(tl.float32)
        dx = (g - (x - mean) * rstd * along_row - offset_row) * rstd
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _columns_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, rows, cols, dy_stride, x_stride, rows_each,
    CENTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Shares of the weight's gradient where rows are too wide to be held: a block of columns over a run of rows."""
    share = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    last = tl.minimum(rows, (share + 1) * rows_each)
    for start in tl.range(share * rows_each, last, ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        mask = (row < last) & (col < cols)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < last, other=0.0)
        if CENTER:
            x -= tl.load(mean_ptr + row, mask=row < last, other=0.0)
            db += dy
        dw += dy * x * rstd
    place = share.to(tl.int64) * cols + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) < cols
    tl.store(dw_ptr + place, tl.sum(dw, 0), mask=inside)
    if CENTER:
        tl.store(db_ptr + place, tl.sum(db, 0), mask=inside)


KERNELS = tuple(
    Kernel(jit=jit, narrow=ODD_WIDTHS) for jit in (_stream_kernel, _stream_backward_kernel, _columns_kernel)
)
