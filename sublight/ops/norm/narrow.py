"""The norms of narrow rows: several share a program, so that its threads have enough to do."""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.kernels.rows import ODD_WIDTHS
from sublight.ops.norm.parts import load_columns, reciprocal_root


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


KERNEL = Kernel(jit=_tile_kernel, narrow=ODD_WIDTHS)
