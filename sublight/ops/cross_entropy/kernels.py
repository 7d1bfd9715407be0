"""The kernels behind cross_entropy: a row's loss and its gradient out of one read of the row.

Where the gradient is wanted it is written while the row is still on chip, scaled already; where it is not, the same
kernels stop after the loss (GRAD). `tile` takes several narrow rows, `row` one row in registers, `trailing` the rows
that no multiprocessor holds, as softmax's kernels of these names do. The gradient may lie over the logits: a program
stores only where it alone has loaded, and after every other program's part of the row is reduced.
"""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.cross_entropy.terms import (
    base_of,
    below_of,
    capped,
    count_of,
    gradient_of,
    label_gradient_of,
    loss_of,
    power,
    row_of,
    shares_of,
    whole,
)
from sublight.ops.kernels.rows import chunk_places, end_places, forget, publish, sum_of

CLEAR_BLOCK = 4096  # words that a program clears


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


@triton.jit
def _row_kernel(
    x_ptr, label_ptr, count_ptr, d_ptr, loss_ptr, rows, cols, x_stride, d_stride,
    ignore_index, smoothing, z_loss, softcap,
    GRAD: tl.constexpr, COUNT: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, Z: tl.constexpr,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf"))
    label = tl.load(label_ptr + row)
    count = count_of(count_ptr, label_ptr, rows, ignore_index, COUNT)
    c, t = capped(x, mask, softcap, CAP, kind)
    base = base_of(tl.max(c.to(tl.float32), 0))
    # the sum's barrier below comes before any thread stores a gradient over this logit
    known = (label >= 0) & (label < cols)
    picked = tl.load(x_ptr + row * x_stride + label, mask=known, other=0.0)
    picked, tanh = capped(picked, known, softcap, CAP, kind)
    x = forget(x, base, PACKED)
    c, t = capped(x, mask, softcap, CAP, kind)
    total = whole(sum_of(power(c, base, kind), 0, SUMS), base, kind)
    below = total
    if SMOOTH:
        below = sum_of(tl.where(mask, c.to(tl.float32) - base, 0.0), 0, SUMS)
    loss = loss_of(
        base, total, picked.to(tl.float32), below, cols, label, ignore_index, smoothing, z_loss, SMOOTH, Z, kind
    )
    tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty))
    if GRAD:
        if label != ignore_index:
            off, share, spread = shares_of(base, total, count, cols, label, smoothing, z_loss, SMOOTH, Z, kind)
            x = forget(x, total, PACKED)
            c, t = capped(x, mask, softcap, CAP, kind)
            d = gradient_of(c, t, off, share, spread, SMOOTH, CAP, Z, kind)
            tl.store(d_ptr + row * d_stride + col, d.to(kind), mask=mask)
            # the label's own, once more and behind a barrier: to look for it in every column costs what rows need
            tl.debug_barrier()
            d = label_gradient_of(picked, tanh, base, total, count, cols, smoothing, z_loss, SMOOTH, CAP, Z, kind)
            tl.store(d_ptr + row * d_stride + label, d.to(kind), mask=known)
        else:  # whatever such a row holds, NaN included
            tl.store(d_ptr + row * d_stride + col, tl.zeros([BLOCK], kind), mask=mask)


@triton.jit
def _trailing_kernel(
    x_ptr, label_ptr, count_ptr, d_ptr, loss_ptr, part_ptr, rows, cols, x_stride, d_stride, lag, parts,
    ignore_index, smoothing, z_loss, softcap,
    GRAD: tl.constexpr, COUNT: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, Z: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, VECTOR: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.program_id(0)  # the chunk that this program reduces; it finishes the same chunk of a row before
    new_row = first // parts
    part = first - new_row * parts
    fresh, stale = new_row < rows, new_row >= lag
    offset = new_row.to(tl.int64) * x_stride
    here = tl.where(fresh, cols, 0)
    place, inside = chunk_places(offset, part, here, BLOCK, VECTOR)
    x = tl.load(x_ptr + place, mask=inside, other=-float("inf"))
    row = tl.maximum(new_row - lag, 0).to(tl.int64)
    old_offset = row * x_stride
    if GRAD:
        old_place, old_inside = chunk_places(old_offset, part, tl.where(stale, cols, 0), BLOCK, VECTOR)
        old = tl.load(x_ptr + old_place, mask=old_inside, eviction_policy="evict_first")
    label = tl.load(label_ptr + row)
    count = count_of(count_ptr, label_ptr, rows, ignore_index, COUNT)

    c, _ = capped(x, inside, softcap, CAP, kind)
    top = tl.max(c.to(tl.float32), 0)
    if VECTOR > 1:
        ends_place, ends_inside = end_places(offset, part, here, VECTOR)
        ends = tl.load(x_ptr + ends_place, mask=ends_inside, other=-float("inf")).to(tl.float32)
        ends_c, _ = capped(ends, ends_inside, softcap, CAP, kind)
        top = tl.maximum(top, tl.max(ends_c, 0))
    base = base_of(top)
    total = sum_of(power(c, base, kind), 0, SUMS)
    if VECTOR > 1:
        total += sum_of(power(ends_c, base, kind), 0, SUMS)
    publish(part_ptr + first, top, whole(total, base, kind), fresh)
    if SMOOTH:
        below = sum_of(tl.where(inside, c.to(tl.float32) - base, 0.0), 0, SUMS)
        held = tl.sum(inside.to(tl.float32), 0)
        if VECTOR > 1:
            below += sum_of(tl.where(ends_inside, ends_c - base, 0.0), 0, SUMS)
            held += tl.sum(ends_inside.to(tl.float32), 0)
        publish(part_ptr + rows * parts + first, below, held + 1.0, fresh)  # never zero: zero means not there yet

    # one program a row has its loss to write: that which stores the label's gradient, so that it can store it last
    known = (label >= 0) & (label < cols)
    lead = (old_offset % VECTOR).to(tl.int32)
    at = lead + label.to(tl.int32)
    mine = at // BLOCK == part
    if VECTOR > 1:
        vector = at // VECTOR * VECTOR
        mine = tl.where((vector >= lead) & (vector + VECTOR <= lead + cols), mine, part == 0)
    mine = tl.where(known, mine, part == 0) & stale
    picked = tl.load(x_ptr + old_offset + label, mask=mine & known, other=0.0)
    if GRAD:
        d_offset = row * d_stride
        d_place = old_place + (d_offset // VECTOR * VECTOR - old_offset // VECTOR * VECTOR)
        if VECTOR > 1:
            d_ends_place, d_ends_inside = end_places(d_offset, part, tl.where(stale, cols, 0), VECTOR)
        work = stale
    else:
        work = mine
    if work & (label != ignore_index):
        row_base, row_total = row_of(part_ptr + row * parts, parts, PARTS, SUMS)
        row_below = row_total
        if SMOOTH:
            row_below = below_of(part_ptr + row * parts, rows * parts, parts, row_base, PARTS, SUMS)
        picked_c, picked_t = capped(picked, known, softcap, CAP, kind)
        if mine:
            loss = loss_of(
                row_base, row_total, picked_c.to(tl.float32), row_below, cols, label, ignore_index, smoothing, z_loss,
                SMOOTH, Z, kind,
            )  # fmt: skip
            tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty))
            tl.debug_barrier()  # every thread has this logit before one stores a gradient over it
        if GRAD:
            off, share, spread = shares_of(row_base, row_total, count, cols, label, smoothing, z_loss, SMOOTH, Z, kind)
            old_c, old_t = capped(old, old_inside, softcap, CAP, kind)
            d = gradient_of(old_c, old_t, off, share, spread, SMOOTH, CAP, Z, kind)
            if VECTOR > 1:
                old_ends_place, old_ends_inside = end_places(old_offset, part, cols, VECTOR)
                old_ends = tl.load(x_ptr + old_ends_place, mask=old_ends_inside, other=0.0).to(tl.float32)
                old_ends_c, old_ends_t = capped(old_ends, old_ends_inside, softcap, CAP, kind)
                ends_d = gradient_of(old_ends_c, old_ends_t, off, share, spread, SMOOTH, CAP, Z, kind)
                tl.store(d_ptr + d_ends_place, ends_d.to(kind), mask=d_ends_inside)
            tl.store(d_ptr + d_place, d.to(kind), mask=old_inside, cache_modifier=".cs")
            if mine:
                label_d = label_gradient_of(
                    picked_c, picked_t, row_base, row_total, count, cols, smoothing, z_loss, SMOOTH, CAP, Z, kind
                )
                tl.debug_barrier()
                tl.store(d_ptr + d_offset + label, label_d.to(kind), mask=known)
    elif work:  # whatever such a row holds, NaN included
        if mine:
            tl.store(loss_ptr + row, tl.zeros([], loss_ptr.dtype.element_ty))
        if GRAD:
            tl.store(d_ptr + d_place, tl.zeros([BLOCK], kind), mask=old_inside, cache_modifier=".cs")
            if VECTOR > 1:
                tl.store(d_ptr + d_ends_place, tl.zeros([2 * VECTOR], kind), mask=d_ends_inside)


@triton.jit
def _prepare_kernel(
    label_ptr, count_ptr, part_ptr, rows, words, ignore_index,
    COUNT: tl.constexpr, LABELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros for what `trailing` publishes, and by the first program the count of labels that are not ignored."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(part_ptr + at, tl.zeros([BLOCK], tl.int64), mask=at < words)
    if COUNT:  # noqa: SIM102 (one for the compiler, one for the GPU)
        if tl.program_id(0) == 0:
            counts = tl.zeros([LABELS], tl.int32)
            for start in range(0, rows, LABELS):
                row = start + tl.arange(0, LABELS)
                label = tl.load(label_ptr + row, mask=row < rows, other=ignore_index)
                counts += (label != ignore_index).to(tl.int32)
            tl.store(count_ptr, tl.sum(counts, 0).to(tl.float32))


@triton.jit
def _total_kernel(
    loss_ptr, label_ptr, out_ptr, count_ptr, rows, ignore_index, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The rows' losses added up in a fixed order, and for a mean over how many."""
    totals = tl.zeros([BLOCK], loss_ptr.dtype.element_ty)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        totals += tl.load(loss_ptr + row, mask=row < rows, other=0.0)
        if COUNT == "labels":
            label = tl.load(label_ptr + row, mask=row < rows, other=ignore_index)
            counts += (label != ignore_index).to(tl.int32)
    total = tl.sum(totals, 0)
    if COUNT == "labels":
        count = tl.sum(counts, 0).to(tl.float32)
        tl.store(count_ptr, count)
        total = total / count  # none: 0 / 0 is NaN, as PyTorch has it
    elif COUNT == "given":
        total = total / tl.load(count_ptr)
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty))


@triton.jit
def _scale_kernel(
    d_ptr, dloss_ptr, count_ptr, rows, cols, d_stride, dloss_stride, factor,
    PER_ROW: tl.constexpr, LATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient times the loss's own, in place. That is 1.0 where the loss is what backward() was called on: then
    nothing is left to do, and only this kernel can know without waiting for the GPU."""
    scale = factor
    if LATE:
        count = tl.load(count_ptr)
        scale = tl.where(count > 0.0, tl.div_rn(factor, count), factor)
    by = tl.load(dloss_ptr).to(tl.float32) * scale
    rows_left = rows
    if not PER_ROW:
        rows_left = tl.where(by == 1.0, 0, rows)
    for row in range(tl.program_id(0), rows_left, tl.num_programs(0)):
        if PER_ROW:
            by = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32) * scale
        start = d_ptr + (row + tl.zeros([], tl.int64)) * d_stride  # int64: rows * cols may pass 2**31
        for chunk in range(tl.program_id(1) * BLOCK, tl.where(by == 1.0, 0, cols), tl.num_programs(1) * BLOCK):
            col = chunk + tl.arange(0, BLOCK)
            d = tl.load(start + col, mask=col < cols).to(tl.float32) * by
            tl.store(start + col, d.to(d_ptr.dtype.element_ty), mask=col < cols)


KERNELS = tuple(
    Kernel(jit=jit)
    for jit in (_tile_kernel, _row_kernel, _trailing_kernel, _prepare_kernel, _total_kernel, _scale_kernel)
)
