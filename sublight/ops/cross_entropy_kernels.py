"""The kernels behind cross_entropy: a row's loss and its gradient out of one read of the row.

Where the gradient is wanted it is written while the row is still on chip, scaled already; where it is not, the same
kernels stop after the loss (GRAD). `tile` takes several narrow rows, `row` one row in registers, `trailing` the rows
that no multiprocessor holds, as softmax's kernels of these names do. The gradient may lie over the logits: a program
stores only where it alone has loaded, and after every other program's part of the row is reduced.
"""

from __future__ import annotations

from sublight.jit import tl, triton
from sublight.op import Kernel
from sublight.ops.rows import chunk_places, collect, end_places, forget, publish, sum_of
from sublight.ops.softmax import LOG2_E, exp_below

COUNT_BLOCK = 4096  # rows that one step of adding up losses or counting labels takes
FEW_LABELS = tl.constexpr(1024)  # so many every program counts itself, which saves a launch


@triton.jit
def squash(x, softcap, kind: tl.constexpr):
    """tanh(x / softcap). An fp32 result would show what is lost near zero, so there a polynomial takes over."""
    if kind == tl.float32:
        u = tl.div_rn(x, softcap + tl.zeros_like(x))
        e = exp_below(-2.0 * tl.abs(u), 0.0)
        far = tl.div_rn(1.0 - e, 1.0 + e)
        z = u * u
        p = z * 2.2958184e-3 - 8.346956e-3
        p = p * z + 2.1769952e-2
        p = p * z - 5.3959403e-2
        p = p * z + 1.3333304e-1
        p = p * z - 3.3333334e-1
        return tl.where(tl.abs(u) < 0.625, u + u * z * p, tl.where(u < 0, -far, far))
    else:
        u = x.to(tl.float32) * (1.0 / softcap)
        e = tl.exp2(tl.abs(u) * (-2.0 * LOG2_E))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(u < 0, -t, t)


@triton.jit
def capped(x, inside, softcap, CAP: tl.constexpr, kind: tl.constexpr):
    """The logits that count, minus infinity outside of the row, and the tanh that they came from."""
    if CAP:
        t = squash(x, softcap, kind)
        return tl.where(inside, softcap * t, -float("inf")), t
    else:
        return x, x


@triton.jit
def power(c, base, kind: tl.constexpr):
    """exp(c - base), as exactly as a result of that kind shows."""
    if kind == tl.float32:
        return exp_below(c, base)
    else:
        return tl.exp2(c.to(tl.float32) * LOG2_E - base * LOG2_E)


@triton.jit
def base_of(top):
    """What is taken off before exponentials: nothing where all is masked, so that the sum is zero and not NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def scale_of(count_ptr, label_ptr, rows, ignore_index, COUNT: tl.constexpr):
    """One over the labels that count, or one where the gradient is not a mean's."""
    if COUNT == "given":
        return tl.div_rn(1.0, tl.load(count_ptr))
    elif COUNT == "labels":
        at = tl.arange(0, FEW_LABELS)
        labels = tl.load(label_ptr + at, mask=at < rows, other=ignore_index)
        return tl.div_rn(1.0, tl.sum((labels != ignore_index).to(tl.int32), 0).to(tl.float32))
    else:
        return 1.0


@triton.jit
def loss_of(
    base, total, picked, below, cols, label, ignore_index, smoothing, z_loss, SMOOTH: tl.constexpr, kind: tl.constexpr
):
    """A row's loss. From fp32 logits it is worked out in float64, once a row, and rounded where it leaves: the loss is
    one number, and nothing averages its error out."""
    if kind == tl.float32:
        base, total = base.to(tl.float64), total.to(tl.float64)
        picked, below = picked.to(tl.float64), below.to(tl.float64)
    log_total = tl.log(total)
    loss = log_total - (picked - base)
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing * (log_total - below / cols)
    lse = base + log_total
    loss += z_loss * (lse * lse)
    loss = tl.where((label < 0) | (label >= cols), float("nan"), loss)
    return tl.where(label == ignore_index, 0.0, loss)


@triton.jit
def shares_of(base, total, cols, label, scale, smoothing, z_loss):
    """What the gradient needs of a row: the factor of each exponential, and what comes off at the label."""
    lse = base + tl.log(total)
    share = tl.div_rn(scale * (1.0 + 2.0 * z_loss * lse), total)
    share = tl.where((label < 0) | (label >= cols), float("nan"), share)
    return share, scale * (1.0 - smoothing)


@triton.jit
def gradient_of(
    c, t, hit, base, share, on_label, spread, label, ignore_index,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    d = power(c, base, kind) * share
    if SMOOTH:
        d -= spread
    d = tl.where(hit, d - on_label, d)
    if CAP:
        d *= 1.0 - t * t
    return tl.where(label == ignore_index, 0.0, d)  # whatever such a row holds, NaN included


@triton.jit
def _tile_kernel(
    x_ptr, label_ptr, count_ptr, d_ptr, loss_ptr, rows, cols, x_stride, d_stride,
    ignore_index, smoothing, z_loss, softcap,
    GRAD: tl.constexpr, COUNT: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf"))
    label = tl.load(label_ptr + row, mask=row < rows, other=ignore_index)
    scale = scale_of(count_ptr, label_ptr, rows, ignore_index, COUNT)
    c, t = capped(x, mask, softcap, CAP, kind)
    base = base_of(tl.max(c.to(tl.float32), 1)[:, None])
    total = sum_of(power(c, base, kind), 1, SUMS)[:, None]
    hit = col == label
    picked = tl.sum(tl.where(hit, c.to(tl.float32), 0.0), 1)[:, None]
    below = total
    if SMOOTH:
        below = sum_of(tl.where(mask, c.to(tl.float32) - base, 0.0), 1, SUMS)[:, None]
    loss = loss_of(base, total, picked, below, cols, label, ignore_index, smoothing, z_loss, SMOOTH, kind)
    tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty), mask=row < rows)
    if GRAD:
        share, on_label = shares_of(base, total, cols, label, scale, smoothing, z_loss)
        spread = scale * smoothing / cols
        d = gradient_of(c, t, hit, base, share, on_label, spread, label, ignore_index, SMOOTH, CAP, kind)
        tl.store(d_ptr + row * d_stride + col, d.to(kind), mask=mask)


@triton.jit
def _row_kernel(
    x_ptr, label_ptr, count_ptr, d_ptr, loss_ptr, rows, cols, x_stride, d_stride,
    ignore_index, smoothing, z_loss, softcap,
    GRAD: tl.constexpr, COUNT: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf"))
    label = tl.load(label_ptr + row)
    scale = scale_of(count_ptr, label_ptr, rows, ignore_index, COUNT)
    c, t = capped(x, mask, softcap, CAP, kind)
    base = base_of(tl.max(c.to(tl.float32), 0))
    # the sum's barrier below comes before any thread stores a gradient over this logit
    known = (label >= 0) & (label < cols)
    picked = tl.load(x_ptr + row * x_stride + label, mask=known, other=0.0)
    picked, tanh = capped(picked, known, softcap, CAP, kind)
    x = forget(x, base, PACKED)
    c, t = capped(x, mask, softcap, CAP, kind)
    total = sum_of(power(c, base, kind), 0, SUMS)
    below = total
    if SMOOTH:
        below = sum_of(tl.where(mask, c.to(tl.float32) - base, 0.0), 0, SUMS)
    loss = loss_of(
        base, total, picked.to(tl.float32), below, cols, label, ignore_index, smoothing, z_loss, SMOOTH, kind
    )
    tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty))
    if GRAD:
        share, on_label = shares_of(base, total, cols, label, scale, smoothing, z_loss)
        spread = scale * smoothing / cols
        x = forget(x, total, PACKED)
        c, t = capped(x, mask, softcap, CAP, kind)
        d = gradient_of(c, t, False, base, share, on_label, spread, label, ignore_index, SMOOTH, CAP, kind)
        tl.store(d_ptr + row * d_stride + col, d.to(kind), mask=mask)
        # the label's own, once more and behind a barrier: to look for it in every column costs registers that rows need
        tl.debug_barrier()
        d = gradient_of(picked, tanh, True, base, share, on_label, spread, label, ignore_index, SMOOTH, CAP, kind)
        tl.store(d_ptr + row * d_stride + label, d.to(kind), mask=known)


@triton.jit
def _trailing_kernel(
    x_ptr, label_ptr, count_ptr, d_ptr, loss_ptr, part_ptr, rows, cols, x_stride, d_stride, units, lag, parts,
    ignore_index, smoothing, z_loss, softcap,
    GRAD: tl.constexpr, COUNT: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, VECTOR: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.program_id(0)  # the chunk that this program reduces …
    second = first - lag  # … and the one that it finishes
    offset, part = (first // parts).to(tl.int64) * x_stride, first % parts
    here = tl.where(first < units, cols, 0)
    place, inside = chunk_places(offset, part, here, BLOCK, VECTOR)
    x = tl.load(x_ptr + place, mask=inside, other=-float("inf"))
    old_unit = tl.maximum(second, 0)
    row, old_part = (old_unit // parts).to(tl.int64), old_unit % parts
    old_offset = row * x_stride
    if GRAD:
        old_place, old_inside = chunk_places(old_offset, old_part, tl.where(second >= 0, cols, 0), BLOCK, VECTOR)
        old = tl.load(x_ptr + old_place, mask=old_inside, other=-float("inf"), eviction_policy="evict_first")
    label = tl.load(label_ptr + row)
    scale = scale_of(count_ptr, label_ptr, rows, ignore_index, COUNT)

    c, _ = capped(x, inside, softcap, CAP, kind)
    top = tl.max(c.to(tl.float32), 0)
    if VECTOR > 1:
        ends_place, ends_inside = end_places(offset, part, here, VECTOR)
        ends = tl.load(x_ptr + ends_place, mask=ends_inside, other=-float("inf"))
        ends_c, _ = capped(ends, ends_inside, softcap, CAP, kind)
        top = tl.maximum(top, tl.max(ends_c.to(tl.float32), 0))
    base = base_of(top)
    total = sum_of(power(c, base, kind), 0, SUMS)
    if VECTOR > 1:
        total += sum_of(power(ends_c, base, kind), 0, SUMS)
    publish(part_ptr + first, top, total, first < units)
    if SMOOTH:
        below = sum_of(tl.where(inside, c.to(tl.float32) - base, 0.0), 0, SUMS)
        count = tl.sum(inside.to(tl.float32), 0)
        if VECTOR > 1:
            below += sum_of(tl.where(ends_inside, ends_c.to(tl.float32) - base, 0.0), 0, SUMS)
            count += tl.sum(ends_inside.to(tl.float32), 0)
        publish(part_ptr + units + first, below, count + 1.0, first < units)  # never zero: zero means not there yet

    # one program a row has its loss to write: that which stores the label's gradient, so that it can store it last
    known = (label >= 0) & (label < cols)
    lead = (old_offset % VECTOR).to(tl.int32)
    at = lead + label.to(tl.int32)
    mine = at // BLOCK == old_part
    if VECTOR > 1:
        vector = at // VECTOR * VECTOR
        mine = tl.where((vector >= lead) & (vector + VECTOR <= lead + cols), mine, old_part == 0)
    mine = tl.where(known, mine, old_part == 0) & (second >= 0)
    picked = tl.load(x_ptr + old_offset + label, mask=mine & known, other=0.0)
    if GRAD:
        work = second >= 0
    else:
        work = mine
    if work:
        tops, totals = collect(part_ptr + row * parts, parts, PARTS)
        row_base = base_of(tl.max(tops, 0))
        row_total = sum_of(totals * exp_below(tops, row_base), 0, SUMS)
        row_below = row_total
        if SMOOTH:
            belows, counts = collect(part_ptr + units + row * parts, parts, PARTS)
            belows += (counts - 1.0) * (base_of(tops) - row_base)
            row_below = sum_of(tl.where(counts > 0, belows, 0.0), 0, SUMS)
        picked_c, picked_t = capped(picked, known, softcap, CAP, kind)
        if mine:
            loss = loss_of(
                row_base, row_total, picked_c.to(tl.float32), row_below, cols, label, ignore_index, smoothing, z_loss,
                SMOOTH, kind,
            )  # fmt: skip
            tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty))
            tl.debug_barrier()  # every thread has this logit before one stores a gradient over it
        if GRAD:
            share, on_label = shares_of(row_base, row_total, cols, label, scale, smoothing, z_loss)
            spread = scale * smoothing / cols
            old_c, old_t = capped(old, old_inside, softcap, CAP, kind)
            d = gradient_of(
                old_c, old_t, False, row_base, share, on_label, spread, label, ignore_index, SMOOTH, CAP, kind
            )
            d_place, d_inside = chunk_places(row * d_stride, old_part, cols, BLOCK, VECTOR)
            if VECTOR > 1:
                old_ends_place, old_ends_inside = end_places(old_offset, old_part, cols, VECTOR)
                old_ends = tl.load(x_ptr + old_ends_place, mask=old_ends_inside, other=-float("inf"))
                old_ends_c, old_ends_t = capped(old_ends, old_ends_inside, softcap, CAP, kind)
                ends_d = gradient_of(
                    old_ends_c, old_ends_t, False, row_base, share, on_label, spread, label, ignore_index,
                    SMOOTH, CAP, kind,
                )  # fmt: skip
                d_ends_place, d_ends_inside = end_places(row * d_stride, old_part, cols, VECTOR)
                tl.store(d_ptr + d_ends_place, ends_d.to(kind), mask=d_ends_inside)
            tl.store(d_ptr + d_place, d.to(kind), mask=d_inside, cache_modifier=".cs")
            if mine:
                label_d = gradient_of(
                    picked_c, picked_t, True, row_base, share, on_label, spread, label, ignore_index, SMOOTH, CAP, kind
                )
                tl.debug_barrier()
                tl.store(d_ptr + row * d_stride + label, label_d.to(kind), mask=known)


@triton.jit
def _prepare_kernel(
    label_ptr, count_ptr, part_ptr, rows, words, ignore_index, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Zeros for what `trailing` publishes, and by the first program the count of labels that are not ignored."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(part_ptr + at, tl.zeros([BLOCK], tl.int64), mask=at < words)
    if COUNT:  # noqa: SIM102 (one for the compiler, one for the GPU)
        if tl.program_id(0) == 0:
            counts = tl.zeros([BLOCK], tl.int32)
            for start in range(0, rows, BLOCK):
                row = start + tl.arange(0, BLOCK)
                label = tl.load(label_ptr + row, mask=row < rows, other=ignore_index)
                counts += (label != ignore_index).to(tl.int32)
            tl.store(count_ptr, tl.sum(counts, 0).to(tl.float32))


@triton.jit
def _total_kernel(loss_ptr, label_ptr, out_ptr, count_ptr, rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The rows' losses added up in a fixed order, and for a mean over how many."""
    totals = tl.zeros([BLOCK], loss_ptr.dtype.element_ty)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        totals += tl.load(loss_ptr + row, mask=row < rows, other=0.0)
        if MEAN:
            label = tl.load(label_ptr + row, mask=row < rows, other=ignore_index)
            counts += (label != ignore_index).to(tl.int32)
    total = tl.sum(totals, 0)
    if MEAN:
        count = tl.sum(counts, 0).to(tl.float32)
        tl.store(count_ptr, count)
        total = total / count  # none: 0 / 0 is NaN, as PyTorch has it
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
