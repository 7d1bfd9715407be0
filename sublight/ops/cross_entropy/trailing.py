"""Cross-entropy of rows that no multiprocessor holds, or that begin anywhere: in chunks.

Every program reduces one chunk of a row and then finishes the same chunk of a row some rows before, for whose other
chunks it waits and which the L2 still holds. The gradient may lie over the logits: a program stores only where it alone
has loaded, and after every other program's part of the row is reduced.
"""

from __future__ import annotations

from sublight.backend.jit import cdiv, tl, triton
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
from sublight.ops.kernels.rows import Rows, chunk_places, end_places, is_ragged, publish, sum_of
from sublight.ops.record.tuning import Tile
from sublight.ops.softmax.plans import LAG_BYTES


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


KERNEL = Kernel(jit=_trailing_kernel)


def chunks_of_rows(x: Rows, d: Rows, tile: Tile, *, smooth: bool) -> tuple[int, int, int, int]:
    """Elements of a vector, chunks of a row, rows that the second pass trails by, and words that chunks publish."""
    vector = 16 // x.itemsize if is_ragged(x, d) else 1
    parts = cdiv(x.cols + vector - 1, tile.block)
    lag = min(x.rows, cdiv(LAG_BYTES, parts * tile.block * x.itemsize))
    return vector, parts, lag, x.rows * parts * (2 if smooth else 1)
