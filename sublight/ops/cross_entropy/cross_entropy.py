"""Cross-entropy of logits against labels; forward and backward are one pass over the logits: read them, write their
gradient.

The gradient is finished in the forward pass, scaled by one over the count of labels, because the loss is nearly always
what `backward()` is called on: then there is nothing left to multiply by. A gradient of fp16 is kept unscaled until the
backward pass: one over the count would push most of it below what fp16 can hold, and a loss scale could not bring it
back.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.loss import cross_entropy as cost
from sublight.errors import BadInput
from sublight.op import Choice, Op
from sublight.ops.cross_entropy.kernels import KERNELS
from sublight.ops.cross_entropy.launch import (
    OPTIONS_SCHEMA,
    Options,
    is_late,
    kernel_for,
    launch_scale,
    new_count,
    run,
)
from sublight.ops.kernels.rows import as_rows, generator_for, random_rows, why_torch
from sublight.ops.record.library import LIBRARY, is_plain, on_its_device, peer
from sublight.timing import Thunk

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")


def reference(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    ignore_index, label_smoothing, z_loss, softcap, reduction = Options(**options)
    x, target = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    entropy = partial(F.cross_entropy, x, target, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if not z_loss:
        loss = entropy(reduction=reduction)
        return loss.view(labels.shape) if reduction == "none" else loss
    kept = target != ignore_index
    loss = entropy(reduction="none") + torch.where(kept, z_loss * torch.logsumexp(x, -1).square(), 0.0)
    if reduction == "none":
        return loss.view(labels.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / kept.sum()


def check(logits: torch.Tensor, labels: torch.Tensor, options: Options) -> None:
    """Refuse what has no loss."""
    if labels.dtype != torch.int64:
        raise BadInput(f"labels are {str(labels.dtype).removeprefix('torch.')}: they must be class numbers of int64")
    if labels.shape != logits.shape[:-1]:
        wanted = tuple(logits.shape[:-1])
        raise BadInput(f"labels have shape {tuple(labels.shape)}, logits are {tuple(logits.shape)}: pass {wanted}")
    if labels.device != logits.device:
        raise BadInput(f"logits are on {logits.device}, labels on {labels.device}: move one of them")
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise BadInput(f"label_smoothing is {options.label_smoothing}: it must be between 0 and 1")
    if not 0.0 <= options.softcap < math.inf:
        raise BadInput(f"softcap is {options.softcap}: it must be positive, or 0 for none")
    if not 0.0 <= options.z_loss < math.inf:
        raise BadInput(f"z_loss is {options.z_loss}: it must be positive, or 0 for none")
    if options.reduction not in REDUCTIONS:
        raise BadInput(f"unknown reduction {options.reduction!r}: use one of {', '.join(REDUCTIONS)}")


def launch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Our forward kernel, whatever `choose` would say."""
    return run(logits, labels, Options(), gradient="no")[0]


def launch_backward(dloss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
    """The gradient as the forward pass leaves it, then scaled."""
    _, d, count = run(logits, labels, Options(), gradient="new")
    launch_scale(d, dloss, count, is_late(logits, Options()))
    return (d,)


def choose(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> Choice:
    """What `cross_entropy(logits, labels)` runs, and why."""
    if reason := why_torch(logits):
        return Choice(provider="torch", kernel="torch.nn.functional.cross_entropy", reason=reason)
    x, cols = as_rows(logits), logits.shape[-1]
    name, _ = kernel_for(x, x, Options())
    how = {"tile": "several rows a program", "row": "one row in registers", "trailing": "chunks, second pass from L2"}
    return Choice(provider="sublight", kernel=f"_{name}_kernel", reason=f"{cols} columns: {how[name]}")


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
    if why_torch(logits):
        return reference(logits, labels, **options._asdict())
    wanted = torch.is_grad_enabled() and logits.requires_grad
    if in_place and wanted and is_plain([logits, labels]):
        if logits.is_leaf:
            raise BadInput("in_place would overwrite logits that are a leaf of autograd: leave it away")
        return _InPlace.apply(logits, labels, options)  # type: ignore[no-any-return]
    return _cross_entropy(logits, labels, *options, wanted)[0]  # type: ignore[no-any-return]


def composed(x: torch.Tensor, labels: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's loss and its gradient in PyTorch's ops, for devices that our kernels do not run on."""
    kind = torch.promote_types(x.dtype, torch.float32)
    c = x.to(kind)
    if options.softcap:
        t = torch.tanh(c / options.softcap)
        c = options.softcap * t
    kept = labels != options.ignore_index
    label = torch.where(kept, labels, 0).unsqueeze(-1)
    lse = torch.logsumexp(c, -1)
    on_label, spread = 1 - options.label_smoothing, options.label_smoothing / x.shape[-1]
    loss = on_label * (lse - c.gather(-1, label).squeeze(-1)) + options.z_loss * lse.square()
    if options.label_smoothing:
        loss = loss + options.label_smoothing * (lse - c.mean(-1))
    d = torch.exp(c - lse.unsqueeze(-1)) * (1 + 2 * options.z_loss * lse.unsqueeze(-1)) - spread
    d = d.scatter_add(-1, label, d.new_full((), -on_label).expand(label.shape))
    if options.softcap:
        d = d * (1 - t * t)
    return torch.where(kept, loss, 0.0), torch.where(kept.unsqueeze(-1), d, 0.0)


def _cpu(logits: torch.Tensor, labels: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options, wanted = Options(*rest[:-1]), rest[-1]
    losses, d = composed(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), options)
    count = (labels != options.ignore_index).sum().float() if options.reduction == "mean" else d.new_empty(0).float()
    if options.reduction == "none":
        loss = losses.view(labels.shape)
    else:
        loss = losses.sum() if options.reduction == "sum" else losses.sum() / count
    if options.reduction == "mean" and not is_late(logits, options):
        d = d / count.clamp(min=1)
    d = d.view(logits.shape).to(logits.dtype).contiguous() if wanted else logits.new_empty(0)
    return loss.to(logits.dtype), d, count


def _cuda(logits: torch.Tensor, labels: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return run(logits, labels, Options(*rest[:-1]), gradient="new" if rest[-1] else "no")


def _fake(logits: torch.Tensor, labels: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options, wanted = Options(*rest[:-1]), rest[-1]
    loss = logits.new_empty(labels.shape if options.reduction == "none" else ())
    d = torch.empty_like(logits, memory_format=torch.contiguous_format) if wanted else logits.new_empty(0)
    return loss, d, new_count(logits, options)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, labels, *options, wanted = inputs
    ctx.save_for_backward(logits, labels)
    ctx.options, ctx.count = options, output[2]
    ctx.gradient = output[1] if wanted else None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    nothing = (None,) * 7
    if dloss is None:
        return None, *nothing
    # the gradient is scaled where it lies and then belongs to whoever asked: a second backward pass needs another
    d, ctx.gradient = ctx.gradient, None
    if d is None:
        logits, labels = ctx.saved_tensors
        _, d, _ = _cross_entropy(logits.detach(), labels, *ctx.options, True)
    return scaled(d, dloss, ctx.count, is_late(d, Options(*ctx.options))), *nothing


class _InPlace(torch.autograd.Function):
    """The gradient lies where the logits were, so there is one, and one backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, options: Options) -> torch.Tensor:
        loss, ctx.gradient, ctx.count = on_its_device(partial(run, gradient="in place"))(logits, labels, options)
        ctx.late = is_late(logits, options)
        torch.autograd.graph.increment_version(logits)  # whoever else has saved them hears of it
        return loss  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        d, ctx.gradient = ctx.gradient, None
        if d is None:
            raise BadInput("a second backward pass through cross_entropy(in_place=True): leave in_place away")
        return scaled(d, dloss, ctx.count, ctx.late), None, None


def scaled(d: torch.Tensor, dloss: torch.Tensor, count: torch.Tensor, late: bool, factor: float = 1.0) -> torch.Tensor:
    """The gradient times the loss's own: in place, unless somebody traces this and holds it to be an output."""
    if not is_plain([d, dloss, count]):
        return _scaled(d, dloss, count, late, factor)  # type: ignore[no-any-return]
    on_its_device(launch_scale)(d, dloss, count, late, factor)
    return d


def _cpu_scaled(d: torch.Tensor, dloss: torch.Tensor, count: torch.Tensor, late: bool, factor: float) -> torch.Tensor:
    by = dloss.to(torch.promote_types(d.dtype, torch.float32)) * factor
    if late:
        by = by / count.clamp(min=1)
    return (d * by.unsqueeze(-1) if by.dim() else d * by).to(d.dtype)


def _cuda_scaled(d: torch.Tensor, dloss: torch.Tensor, count: torch.Tensor, late: bool, factor: float) -> torch.Tensor:
    copy = d.clone()
    launch_scale(copy, dloss, count, late, factor)
    return copy


_cross_entropy = LIBRARY.op(
    f"cross_entropy(Tensor logits, Tensor labels, {OPTIONS_SCHEMA}, bool with_gradient) -> (Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_scaled = LIBRARY.op(
    "cross_entropy_scaled(Tensor gradient, Tensor dloss, Tensor count, bool late, float factor) -> Tensor",
    cpu=_cpu_scaled,
    cuda=_cuda_scaled,
    fake=lambda gradient, dloss, count, late, factor: torch.empty_like(gradient),
)


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
    launch=launch,
    launch_backward=launch_backward,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=KERNELS,
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
