"""What a row's loss and its gradient are made of, for the kernels of cross_entropy."""

from __future__ import annotations

from sublight.backend.jit import tl, triton
from sublight.ops.kernels.rows import HAS_ASSEMBLY, collect, sum_of
from sublight.ops.softmax.softmax import LOG2_E, exp_below, log_of

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
def widen(x):
    """To fp32. Of two bf16 in a register the compiler shifts each down and up again; a shift and a mask will do."""
    if x.dtype == tl.bfloat16 and HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def power(c, base, kind: tl.constexpr):
    """exp(c - base), as exactly as a result of that kind shows."""
    if kind == tl.float32:
        return exp_below(c, base)
    else:
        return tl.exp2(tl.fma(widen(c), LOG2_E, -(base * LOG2_E)))


@triton.jit
def whole(total, base, kind: tl.constexpr):
    """The exponentials' sum without the rounding of base * LOG2_E, which all of them share: the largest one's own shows
    it, so where a row is nothing but its largest the sum is exactly one, and the loss zero."""
    if kind == tl.float32:
        return total
    else:
        return tl.div_rn(total, tl.exp2(tl.fma(base, LOG2_E, -(base * LOG2_E))))


@triton.jit
def base_of(top):
    """What is taken off before exponentials: nothing where all is masked, so that the sum is zero and not NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def count_of(count_ptr, label_ptr, rows, ignore_index, COUNT: tl.constexpr):
    """The labels that count, or one where the gradient is not a mean's."""
    if COUNT == "given":
        return tl.load(count_ptr)
    elif COUNT == "labels":
        at = tl.arange(0, FEW_LABELS)
        labels = tl.load(label_ptr + at, mask=at < rows, other=ignore_index)
        return tl.sum((labels != ignore_index).to(tl.int32), 0).to(tl.float32)
    else:
        return 1.0


@triton.jit
def loss_of(
    base, total, picked, below, cols, label, ignore_index, smoothing, z_loss,
    SMOOTH: tl.constexpr, Z: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """A row's loss. From fp32 logits it is worked out in float64, once a row, and rounded where it leaves: the loss is
    one number, and nothing averages its error out."""
    if kind == tl.float32:
        base, total = base.to(tl.float64), total.to(tl.float64)
        picked, below = picked.to(tl.float64), below.to(tl.float64)
    log_total = log_of(total)
    loss = log_total - (picked - base)
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing * (log_total - below / cols)
    if Z:
        lse = base + log_total
        loss += z_loss * (lse * lse)
    loss = tl.where((label < 0) | (label >= cols), float("nan"), loss)
    return tl.where(label == ignore_index, 0.0, loss)


@triton.jit
def shares_of(
    base, total, count, cols, label, smoothing, z_loss, SMOOTH: tl.constexpr, Z: tl.constexpr, kind: tl.constexpr
):
    """What a row's gradient takes: an exponent to come off, a factor where that cannot hold it, and an even share.

    A 16-bit gradient has its factor in the exponent, which saves a multiplication an element: what that loses of it is
    a millionth.
    """
    over = total * count
    factor, spread = over, over
    if Z:
        factor = 1.0 + 2.0 * z_loss * (base + log_of(total))
    if kind == tl.float32:
        share = tl.div_rn(factor if Z else tl.zeros_like(over) + 1.0, over)
        off = base
    else:
        share = factor
        off = base * LOG2_E + tl.log2(over)
        off = tl.where((label < 0) | (label >= cols), float("nan"), off)
    share = tl.where((label < 0) | (label >= cols), float("nan"), share)
    if SMOOTH:
        spread = tl.div_rn(smoothing + tl.zeros_like(over), cols * (count + tl.zeros_like(over)))
    return off, share, spread


@triton.jit
def gradient_of(c, t, off, share, spread, SMOOTH: tl.constexpr, CAP: tl.constexpr, Z: tl.constexpr, kind: tl.constexpr):
    """Of every column, but for what comes off at the label."""
    if kind == tl.float32:
        d = exp_below(c, off)
        d = tl.fma(d, share, -spread) if SMOOTH else d * share
    else:
        d = tl.exp2(tl.fma(widen(c), LOG2_E, -off))
        if Z:
            d *= share
        if SMOOTH:
            d -= spread
    if CAP:
        d *= 1.0 - t * t
    return d


@triton.jit
def label_gradient_of(
    picked, tanh, base, total, count, cols, smoothing, z_loss,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, Z: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Of the label's own column: where a row is nearly all there, the difference keeps the digits that the column's
    share would have lost. There is one a row, so for an fp32 one it is taken in float64."""
    picked = picked.to(tl.float32)
    over = total * count
    if kind == tl.float32:
        picked, base, total = picked.to(tl.float64), base.to(tl.float64), total.to(tl.float64)
        e = tl.exp(picked - base)
    else:
        e = tl.exp2((picked - base) * LOG2_E)
    if Z:
        e *= 1.0 + 2.0 * z_loss * (base + log_of(total))
    if SMOOTH:
        e -= total * ((1.0 - smoothing) + smoothing / cols)
    else:
        e -= total
    if CAP:
        tanh = tanh.to(e.dtype)
        e *= 1.0 - tanh * tanh
    return tl.div_rn(e.to(tl.float32), over) if kind == tl.float32 else e / over


@triton.jit
def row_of(ptr, parts, PARTS: tl.constexpr, SUMS: tl.constexpr):
    """A row's largest logit and its exponentials' sum from its parts'. More than a warp's worth of them comes in two
    halves: every warp then has them all, and need not wait for others."""
    FEW: tl.constexpr = PARTS if PARTS <= 32 else PARTS // 2
    tops, totals = collect(ptr, tl.minimum(parts, FEW), FEW)
    top = tl.max(tops, 0)
    if PARTS > 32:
        more_tops, more_totals = collect(ptr + FEW, parts - FEW, FEW)
        top = tl.maximum(top, tl.max(more_tops, 0))
    base = base_of(top)
    total = sum_of(totals * exp_below(tops, base), 0, SUMS)
    if PARTS > 32:
        total += sum_of(more_totals * exp_below(more_tops, base), 0, SUMS)
    return base, total


@triton.jit
def below_of(ptr, words, parts, row_base, PARTS: tl.constexpr, SUMS: tl.constexpr):
    """How far a row's logits are below its largest, together: parts have counted from their own."""
    tops, _ = collect(ptr, parts, PARTS)
    belows, held = collect(ptr + words, parts, PARTS)
    belows += (held - 1.0) * (base_of(tops) - row_base)
    return sum_of(tl.where(held > 0, belows, 0.0), 0, SUMS)
