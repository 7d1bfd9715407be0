"""Cross-entropy of narrow rows: several share a program, so that its threads have enough to do."""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.cross_entropy.terms import (
    base_of,
    capped,
    count_of,
    gradient_of,
    label_gradient_of,
    loss_of,
    power,
    shares_of,
    whole,
)
from sublight.ops.kernels.rows import sum_of


@triton.jit
def _tile_kernel(
    x_ptr, label_ptr, count_ptr, d_ptr, loss_ptr, rows, cols, x_stride, d_stride,
    ignore_index, smoothing, z_loss, softcap,
    GRAD: tl.constexpr, COUNT: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, Z: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf"))
    label = tl.load(label_ptr + row, mask=row < rows, other=ignore_index)
    count = count_of(count_ptr, label_ptr, rows, ignore_index, COUNT)
    c, t = capped(x, mask, softcap, CAP, kind)
    base = base_of(tl.max(c.to(tl.float32), 1)[:, None])
    total = whole(sum_of(power(c, base, kind), 1, SUMS)[:, None], base, kind)
    hit = col == tl.where((label >= 0) & (label < cols), label, -1).to(tl.int32)
    picked = tl.sum(tl.where(hit, c.to(tl.float32), 0.0), 1)[:, None]
    below = total
    if SMOOTH:
        below = sum_of(tl.where(mask, c.to(tl.float32) - base, 0.0), 1, SUMS)[:, None]
    loss = loss_of(base, total, picked, below, cols, label, ignore_index, smoothing, z_loss, SMOOTH, Z, kind)
    tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty), mask=row < rows)
    if GRAD:
        off, share, spread = shares_of(base, total, count, cols, label, smoothing, z_loss, SMOOTH, Z, kind)
        d = gradient_of(c, t, off, share, spread, SMOOTH, CAP, Z, kind)
        tanh = tl.div_rn(picked, softcap + tl.zeros_like(picked)) if CAP else picked
        label_d = label_gradient_of(picked, tanh, base, total, count, cols, smoothing, z_loss, SMOOTH, CAP, Z, kind)
        d = tl.where(hit, label_d, d)
        d = tl.where(label == ignore_index, 0.0, d)  # whatever such a row holds, NaN included
        tl.store(d_ptr + row * d_stride + col, d.to(kind), mask=mask)


KERNEL = Kernel(jit=_tile_kernel)
