"""Cross-entropy of logits against labels; forward and backward are one pass over the logits: read them, write their
gradient.

The gradient is finished in the forward pass, scaled by one over the count of labels, because the loss is nearly always
what `backward()` is called on: then there is nothing left to multiply by (`finished.py`). Where no gradient is wanted,
the same kernels stop after the loss (GRAD). The kernel here holds one row in registers; `narrow.py` takes several rows
at once, `trailing.py` rows that no multiprocessor holds, `batch.py` makes one loss of the rows'. What a loss and its
gradient are made of is in `terms.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.loss import cross_entropy as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.cross_entropy import batch, finished, narrow, trailing
from sublight.ops.cross_entropy.finished import Finished, is_unobserved, scaled
from sublight.ops.cross_entropy.options import OPTIONS_SCHEMA, Options, Reduction, check, is_late
from sublight.ops.cross_entropy.terms import (
    FEW_LABELS,
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
from sublight.ops.cross_entropy.tiles import tile_of
from sublight.ops.kernels.rows import (
    Rows,
    copies_of,
    forget,
    generator_for,
    random_rows,
    rows_of,
    sum_of,
    sums_of,
    why_torch,
)
from sublight.ops.record.library import Registered, peer
from sublight.ops.softmax.plans import in_python
from sublight.timing import Thunk


def reference(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return _by_torch(logits, labels, *Options(**options))  # type: ignore[arg-type]


def _by_torch(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: Reduction,
    with_gradient: bool = True,  # PyTorch sees for itself
) -> torch.Tensor:
    named: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if logits.dim() == 2 and not softcap and not z_loss:  # few rows: each view and each line is the caller's time
        return F.cross_entropy(logits, labels, reduction=reduction, **named)
    x, target = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    if not z_loss:
        loss = F.cross_entropy(x, target, reduction=reduction, **named)
        return loss.view(labels.shape) if reduction == "none" else loss
    kept = target != ignore_index
    loss = F.cross_entropy(x, target, reduction="none", **named)
    loss = loss + torch.where(kept, z_loss * torch.logsumexp(x, -1).square(), 0.0)
    if reduction == "none":
        return loss.view(labels.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / kept.sum()


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


KERNELS = (narrow.KERNEL, Kernel(jit=_row_kernel), trailing.KERNEL, *batch.KERNELS, finished.KERNEL)


class RowLosses(NamedTuple):
    """The launches that give each row's loss and, where it is wanted, its gradient."""

    reason: str
    steps: tuple[Step, ...]
    words: int  # of the buffer `part` that they need
    is_counted: bool  # `count` holds the labels' count afterwards: few are counted on the way, by each program itself


def row_losses(
    x: Rows,
    d: Rows | None,
    options: Options,
    like: torch.Tensor,
    *,
    losses: str,
    place: str = "logits",
    is_counted: bool = False,
) -> RowLosses:
    """The losses of `logits` (x) into `losses`, their gradient (d) into `place`, which may be the logits themselves.

    A mean's gradient is divided by `count`, which is worked out here unless `is_counted`. `like` is of the logits' data
    type and device.
    """
    into = x if d is None else d
    name, tile = tile_of(x, into, options, facts(like).capability)
    mean = d is not None and options.reduction == "mean" and not is_late(like, options)
    inline = mean and not is_counted and x.rows <= FEW_LABELS.value and name != "trailing"
    is_counting = mean and not is_counted and not inline
    flags = {
        "GRAD": d is not None,
        "COUNT": "labels" if inline else "given" if mean else "no",
        "SMOOTH": options.label_smoothing > 0,
        "CAP": options.softcap > 0,
        "Z": options.z_loss > 0,
        "SUMS": sums_of(like),
        **tile.options(),
    }
    terms = (options.ignore_index, float(options.label_smoothing), float(options.z_loss), float(options.softcap))
    sizes = (x.rows, x.cols, x.apart, into.apart)
    on = f"logits labels count {place} {losses}"
    words = 0
    if name == "trailing":
        reason = "chunks, second pass from L2"
        vector, parts, lag, words = trailing.chunks_of_rows(x, into, tile, smooth=options.label_smoothing > 0)
        step = Step(
            trailing._trailing_kernel, ((x.rows + lag) * parts,), *sizes, lag, parts, *terms,
            on=f"{on} part", tile=tile, BLOCK=tile.block, PARTS=next_power_of_2(parts), VECTOR=vector, **flags,
        )  # fmt: skip
    elif name == "tile":
        reason = tile.rows_text
        grid = (cdiv(x.rows, tile.rows),)
        constants = {"ROWS": tile.rows, "BLOCK": tile.block}
        step = Step(narrow._tile_kernel, grid, *sizes, *terms, on=on, tile=tile, **constants, **flags)
    else:
        reason = "one row in registers"
        constants = {"BLOCK": tile.block, "PACKED": tile.packed}
        step = Step(_row_kernel, (x.rows,), *sizes, *terms, on=on, tile=tile, **constants, **flags)
    steps: tuple[Step, ...] = (step,)
    if words or is_counting:
        steps = (batch.prepare_step(x.rows, words, options, is_counting=is_counting), step)
    return RowLosses(f"{x.cols} columns: {reason}", steps, words, is_counted or is_counting)


def plan_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *rest: Any,
    gradient: Literal["no", "new", "in place"],
    outputs: tuple[str, ...] = ("loss", "d", "count"),
) -> Plan:
    """The loss, the gradient of the logits (of no size where it is not wanted), the count of labels (the same)."""
    options, x = Options(*rest[: len(Options._fields)]), rows_of(logits)
    check(logits, labels, options)
    if gradient == "in place" and not _holds_gradient(x):
        raise BadInput("logits whose rows share memory, or whose columns are apart, have no place for a gradient")
    d = {"no": None, "new": x.in_one_piece, "in place": x}[gradient]
    each = options.reduction == "none"
    place = "d" if gradient == "new" else "logits"
    rows = row_losses(x, d, options, logits, losses="loss" if each else "losses", place=place)
    buffers = batch.loss_buffers(logits, labels, logits.dtype, options)
    if "d" in outputs:
        buffers["d"] = Buffer(shape=tuple(logits.shape) if gradient == "new" else (0,), dtype=logits.dtype)
    if rows.words:
        buffers["part"] = Buffer(shape=(rows.words,), dtype=torch.int64)
    return Plan(
        provider="sublight",
        reason=rows.reason,
        copies=copies_of(logits=x.is_copy, labels=not labels.is_contiguous()),
        buffers=buffers,
        steps=rows.steps if each else (*rows.steps, batch.total_step(x.rows, options, is_counted=rows.is_counted)),
        outputs=outputs,
    )


def _fake(logits: torch.Tensor, labels: torch.Tensor, *rest: Any) -> Inputs:
    *options, with_gradient = rest
    made = batch.loss_buffers(logits, labels, logits.dtype, Options(*options))
    loss, count = (logits.new_empty(made[name].shape, dtype=made[name].dtype) for name in ("loss", "count"))
    d = torch.empty_like(logits, memory_format=torch.contiguous_format) if with_gradient else logits.new_empty(0)
    return loss, d, count


def _hand_over(dloss: torch.Tensor, saved: Mapping[str, Any], made: Inputs | None, wanted: set[str]) -> Inputs:
    logits, labels, *options = (saved[name] for name in ("logits", "labels", *Options._fields))
    if made is None or not made[0].numel():
        made = torch.ops.sublight.cross_entropy(logits.detach(), labels, *options, True)[1:]
    d, count = made
    return (scaled(d, dloss, count, is_late(logits, Options(*options))),)


_cross_entropy = Registered(
    schema=f"cross_entropy(Tensor logits, Tensor labels, {OPTIONS_SCHEMA}, bool with_gradient)"
    " -> (Tensor loss, Tensor d, Tensor count)",
    reference=_by_torch,
    theirs="torch.nn.functional.cross_entropy",
    why_torch=lambda logits, *rest: why_torch(logits),
    plan=lambda *args: plan_loss(*args, gradient="new" if args[-1] else "no"),
    plan_results=partial(plan_loss, gradient="no", outputs=("loss",)),
    fake=_fake,
    results=1,
    gradient=Finished(by=in_python(_hand_over), saves=("logits", "labels"), gives=("logits",)),
)
_in_place = Registered(
    schema=f"cross_entropy_in_place(Tensor(a!) logits, Tensor labels, {OPTIONS_SCHEMA}) -> (Tensor loss, Tensor count)",
    plan=partial(plan_loss, gradient="in place", outputs=("loss", "count")),
    fake=lambda *args: _fake(*args, False)[::2],
)


class _InPlace(torch.autograd.Function):
    """The gradient lies where the logits were, so there is one, and one backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, options: Options) -> torch.Tensor:
        loss, ctx.count = _in_place.call(logits, labels, *options)
        ctx.gradient, ctx.late = logits.detach(), is_late(logits, options)
        torch.autograd.graph.increment_version(logits)  # whoever else has saved them hears of it
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():
            raise BadInput("cross_entropy(in_place=True) has no second derivative: leave in_place away")
        d, ctx.gradient = ctx.gradient, None
        if d is None:
            raise BadInput("a second backward pass through cross_entropy(in_place=True): leave in_place away")
        return scaled(d, dloss, ctx.count, ctx.late), None, None


def _holds_gradient(x: Rows) -> bool:
    """Whether each row has memory of its own."""
    return not x.is_copy and (x.rows == 1 or x.apart >= x.cols)


def _is_in_place(logits: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether the gradient goes over the logits: our kernels run, nobody watches, and there is a place for it."""
    if why_torch(logits) or not is_unobserved(logits, labels) or logits.is_neg():
        return False
    if not _holds_gradient(rows_of(logits)):
        return False
    if logits.is_leaf:
        raise BadInput("in_place would overwrite logits that are a leaf of autograd: leave it away")
    return True


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: Reduction = "mean",
    in_place: bool = False,
) -> torch.Tensor:
    """The loss of logits (…, classes) against labels (…), as torch.nn.functional.cross_entropy has it.

    `softcap` first makes logits softcap * tanh(logits / softcap); `z_loss` adds z_loss * logsumexp(logits)² to the loss
    of each row. An ignored label's row has no loss and no gradient. On our kernels a label that is no class gives its
    row a loss and a gradient of NaN, where PyTorch stops the process. With `in_place` the gradient may take the logits'
    memory: they must then not be read again, and be no leaf of autograd. Where PyTorch does the work (no GPU, a
    compiler) it takes memory of its own.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check(logits, labels, options)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    if in_place and wanted and _is_in_place(logits, labels):
        return _InPlace.apply(logits, labels, options)  # type: ignore[no-any-return]
    return _cross_entropy.call(logits, labels, *options, wanted)  # type: ignore[no-any-return]


def plan(logits: torch.Tensor, labels: torch.Tensor, *, in_place: bool = False, **options: Any) -> Plan:
    """What `cross_entropy(logits, labels, …)` runs, and why."""
    check(logits, labels, Options(**options))
    wanted = torch.is_grad_enabled() and logits.requires_grad
    if in_place and wanted and _is_in_place(logits, labels):
        return _in_place.decide(logits, labels, *Options(**options))
    return _cross_entropy.decide(logits, labels, *Options(**options), wanted)


def launch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Our forward kernels, whether or not they win."""
    return _cross_entropy.by_kernels(logits, labels, *Options(), False)[0]  # type: ignore[no-any-return]


def launch_backward(dloss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> Inputs:
    """The gradient as the forward pass leaves it, then scaled."""
    _, d, count = _cross_entropy.by_kernels(logits, labels, *Options(), True)
    finished.SCALE_IN_PLACE.by_kernels(d, dloss, count, is_late(logits, Options()), 1.0)
    return (d,)


def random_labels(rows: int, classes: int, device: str, seed: int) -> torch.Tensor:
    """Mostly classes, a sixteenth of them ignored as padding is."""
    generator = generator_for(device, seed + 2_000_003)
    labels = torch.randint(classes, (rows,), generator=generator, device=device)
    ignored = torch.rand(rows, generator=generator, device=device) < 1 / 16
    return torch.where(ignored & (torch.arange(rows, device=device) > 0), -100, labels)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    logits = random_rows(shape, dtype, device, seed, scale=3.0)
    return logits, random_labels(shape["rows"], shape["cols"], device, seed)


def _liger(logits: torch.Tensor, labels: torch.Tensor) -> Thunk:
    # writes the gradient over the logits: who comes after it has small random numbers there, and as much to do
    return lambda: peer("liger_kernel.ops.cross_entropy", "LigerCrossEntropyFunction").apply(logits, labels, None)[0]


def _quack(logits: torch.Tensor, labels: torch.Tensor) -> Thunk:
    return partial(peer("quack.cross_entropy", "cross_entropy"), logits, labels, reduction="mean")


CROSS_ENTROPY = Op(
    name="cross_entropy",
    summary="cross-entropy of logits against labels, its gradient in the same pass",
    reference=reference,
    call=cross_entropy,
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=launch_backward, kernels=KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=tuple(
        {"rows": rows, "cols": cols}
        for rows, cols in (
            *((8192, 32000), (16384, 4096), (65536, 2048), (4096, 50257), (4096, 128256), (4096, 151936)),
            *((1, 128256), (16, 128256), (16, 32000), (128, 32000)),
        )
    ),
    test_shapes=tuple(
        {"rows": rows, "cols": cols}
        for rows, cols in (
            *((1, 1), (3, 127), (65, 128), (17, 129), (40, 2048), (9, 2049), (1030, 16)),
            *((12, 4096), (12, 16384), (6, 32784), (12, 4099)),
        )
    ),
    peers={"liger": _liger, "quack": _quack},
    directions=("fwd", "fwd+bwd"),
    library_args=lambda *inputs: (*inputs, *Options(), True),
)
