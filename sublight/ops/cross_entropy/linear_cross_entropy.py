"""Cross-entropy of hidden @ weight.T against labels, without ever holding all the logits.

Some rows at a time: their logits by a matrix product into one buffer, our cross-entropy kernel turns them into their
gradient where they lie, and two more products take that to the gradients of hidden and weight. So the gradients are
finished in the forward pass, and the backward pass only scales them, where there is anything to scale by. A loss
without reduction has a gradient for each row, which the weight's gradient, a sum over rows, needs first: there the
backward pass does the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from sublight.backend import cublaslt
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.loss import linear_cross_entropy as cost
from sublight.errors import BadInput
from sublight.op import Op, Plan, Provider
from sublight.ops.cross_entropy import cross_entropy, finished
from sublight.ops.cross_entropy import options as options_of_loss
from sublight.ops.cross_entropy.batch import loss_buffers
from sublight.ops.cross_entropy.cross_entropy import random_labels
from sublight.ops.cross_entropy.finished import Finished, scaled
from sublight.ops.cross_entropy.linear_plan import CHUNK_BYTES, ChunkedPlan, alpha_of, loss_dtype, plan_loss
from sublight.ops.cross_entropy.options import OPTIONS_SCHEMA, Options, Reduction, is_late
from sublight.ops.kernels.rows import generator_for, why_torch
from sublight.ops.record.library import Registered, peer
from sublight.ops.softmax.plans import in_python
from sublight.timing import Thunk


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, wide: bool = False, **options: Any
) -> torch.Tensor:
    logits = hidden @ weight.T
    return cross_entropy.reference(logits.to(loss_dtype(logits, wide)), labels, **options)


def check(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: Options, chunk_bytes: int) -> None:
    """Refuse what has no loss."""
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise BadInput(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit: "
            f"pass (…, features) and (classes, features)"
        )
    if hidden.dtype != weight.dtype or hidden.device != weight.device:
        ours, theirs = (f"{str(x.dtype).removeprefix('torch.')} on {x.device}" for x in (hidden, weight))
        raise BadInput(f"hidden is {ours}, weight {theirs}: convert one of them")
    if chunk_bytes < 1:
        raise BadInput(f"chunk_bytes is {chunk_bytes}: it must be positive")
    options_of_loss.check(hidden, labels, options)


def _run(plan: ChunkedPlan, dloss: torch.Tensor | None, *args: Any) -> Inputs:
    """The products and, between them, the plan's launches."""
    given: dict[str, torch.Tensor] = dict(zip(("hidden", "weight", "labels"), args, strict=False))
    given = {name: x.detach().contiguous() if name in plan.copies else x.detach() for name, x in given.items()}
    device = given["hidden"].device
    made = {name: torch.empty(each.shape, dtype=each.dtype, device=device) for name, each in plan.buffers.items()}
    h, w, labels = given["hidden"].reshape(-1, given["hidden"].shape[-1]), given["weight"], given["labels"].view(-1)
    dh, dw, count = made["dh"].view(h.shape) if made["dh"].numel() else None, made["dw"], made["count"]
    growing = made.get("exact_dw", dw)
    if count.dim() == 0:
        count.copy_((labels != args[3]).sum())
    losses = "losses" if "losses" in made else "loss"
    dlosses = None if dloss is None else dloss.reshape(-1)
    for number, chunk in enumerate(plan.chunks):
        rows = chunk.rows
        logits = made["logits"][: rows.stop - rows.start, : w.shape[0]]
        for part in plan.parts:
            if cublaslt.product(h[rows], w[part].T, out=logits[:, part]) is None:  # a kernel that was timed, if any was
                torch.mm(h[rows], w[part].T, out=logits[:, part])
        on = {"logits": logits, "labels": labels[rows], losses: made[losses].view(-1)[rows], "count": count}
        on |= {"part": made["part"]} if "part" in made else {}
        on |= {"dloss": dlosses[rows]} if dlosses is not None else {}
        for step in chunk.steps:
            step(*[on[name] for name in step.on])
        for i, part in enumerate(plan.parts):
            d = logits[:, part]
            if dh is not None and (i or cublaslt.product(d, w[part], out=dh[rows]) is None):
                torch.addmm(dh[rows], d, w[part], beta=float(i > 0), out=dh[rows])
            if dw.numel():
                _add_product(growing[part], d.T, h[rows], beta=float(number > 0), alpha=plan.alpha)
    if growing is not dw:
        dw.copy_(growing)
    if losses == "losses":
        plan.steps[-1](*[{**made, "labels": labels}[name] for name in plan.steps[-1].on])
    return tuple(made[name] for name in plan.outputs)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float, alpha: float) -> None:
    """total = beta * total + alpha * a @ b, where total may be fp32 and a and b 16-bit."""
    if not beta and alpha == 1.0 and total.dtype == a.dtype and cublaslt.product(a, b, out=total) is not None:
        return
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, alpha=alpha, out=total)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, alpha=alpha, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, alpha=alpha, out=total)


class Arguments(NamedTuple):
    """The schema's arguments behind the tensors."""

    options: Options
    chunk_bytes: int
    wants: tuple[bool, bool]
    wide: bool = False

    @classmethod
    def of(cls, rest: tuple[Any, ...]) -> Arguments:
        return cls(Options(*rest[:5]), rest[5], rest[6:8], *rest[8:])


def _plan(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: Any) -> Plan:
    options, chunk_bytes, wants, wide = Arguments.of(rest)
    check(hidden, weight, labels, options, chunk_bytes)
    if options.reduction == "none":  # the gradient needs the loss's own first: the backward pass has it
        wants = (False, False)
    return plan_loss(hidden, weight, labels, options, chunk_bytes, wants, wide=wide)


def _plan_gradients(
    dloss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: Any
) -> Plan:
    options, chunk_bytes, wants, _ = Arguments.of(rest)
    check(hidden, weight, labels, options, chunk_bytes)
    return plan_loss(hidden, weight, labels, options, chunk_bytes, wants, dloss=dloss, outputs=("dh", "dw"))


def _room(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format) if wanted else x.new_empty(0)


def _fake(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: Any) -> Inputs:
    options, _, (wants_hidden, wants_weight), wide = Arguments.of(rest)
    made = loss_buffers(hidden, labels, loss_dtype(hidden, wide), options)
    loss, count = (hidden.new_empty(made[name].shape, dtype=made[name].dtype) for name in ("loss", "count"))
    each = options.reduction == "none"
    return loss, _room(hidden, wants_hidden and not each), _room(weight, wants_weight and not each), count


def _reference(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: Any) -> torch.Tensor:
    options, _, _, wide = Arguments.of(rest)
    return reference(hidden, weight, labels, wide=wide, **options._asdict())


def _hand_over(
    dloss: torch.Tensor, saved: Mapping[str, Any], made: Inputs | None, wanted: set[str]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    hidden, weight, labels = (saved[name] for name in ("hidden", "weight", "labels"))
    options, wants = Options(*(saved[name] for name in Options._fields)), ("hidden" in wanted, "weight" in wanted)
    rest = (*options, saved["chunk_bytes"], *wants)
    if options.reduction == "none":
        dh, dw = _gradients.call(dloss.resolve_neg(), hidden, weight, labels, *rest)
    else:
        if made is None or any(want and not grad.numel() for want, grad in zip(wants, made, strict=False)):
            made = torch.ops.sublight.linear_cross_entropy(hidden.detach(), weight.detach(), labels, *rest, False)[1:]
        dh, dw, count = made
        late = is_late(hidden, options)
        if wants[0]:
            dh = scaled(dh, dloss, count, late)
        if wants[1]:
            dw = scaled(dw, dloss, count, late, 1.0 / alpha_of(labels.numel(), late=late))
    return dh if wants[0] else None, dw if wants[1] else None


def _why_torch(hidden: torch.Tensor, weight: torch.Tensor) -> str:
    if reason := why_torch(hidden, weight):
        return reason
    return "more classes than a row may have" if weight.shape[0] > 2**18 or weight.shape[0] == 0 else ""


_OPTIONS = f"{OPTIONS_SCHEMA}, int chunk_bytes, bool wants_hidden, bool wants_weight"
_gradients = Registered(
    schema=f"linear_cross_entropy_gradients(Tensor dloss, Tensor hidden, Tensor weight, Tensor labels, {_OPTIONS})"
    " -> (Tensor dh, Tensor dw)",
    plan=_plan_gradients,
    fake=lambda dloss, hidden, weight, labels, *rest: (_room(hidden, rest[6]), _room(weight, rest[7])),
    launch=_run,
)
_linear_cross_entropy = Registered(
    schema=f"linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, {_OPTIONS}, bool wide)"
    " -> (Tensor loss, Tensor dh, Tensor dw, Tensor count)",
    reference=_reference,
    theirs="torch.nn.functional.linear, torch.nn.functional.cross_entropy",
    why_torch=lambda hidden, weight, *rest: _why_torch(hidden, weight),
    theirs_bytes=lambda hidden, weight, *rest: hidden.numel() // hidden.shape[-1] * weight.shape[0] * hidden.itemsize,
    plan=_plan,
    fake=_fake,
    launch=lambda plan, *args: _run(plan, None, *args),
    results=1,
    gradient=Finished(by=in_python(_hand_over), saves=("hidden", "weight", "labels"), gives=("hidden", "weight")),
)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: Reduction = "mean",
    wide: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """The loss of hidden (…, features) times weight (classes, features) against labels (…); see `cross_entropy`.

    At most `chunk_bytes` of logits are held at once (or 128 rows of them): half of them or less, unless you allow more
    than the default and all of them fit, which is the fastest. Where that makes more than two chunks, or
    256 MiB hold it, the gradient of a 16-bit weight is added up in fp32, in twice its memory. A `wide` loss is
    given in float32 where hidden is of 16 bits, as that of logits cast to float32 is.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check(hidden, weight, labels, options, chunk_bytes)
    if wide and reduction == "none" and not _why_torch(hidden, weight):
        raise BadInput("a wide loss is one number: use reduction='mean' or 'sum'")
    return _linear_cross_entropy.call(  # type: ignore[no-any-return]
        hidden, weight, labels, *options, chunk_bytes, *_wants(hidden, weight), wide
    )


def _wants(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[bool, bool]:
    grads = torch.is_grad_enabled()
    return grads and hidden.requires_grad, grads and weight.requires_grad


def plan(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    wide: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    **options: Any,
) -> Plan:
    """What `linear_cross_entropy(hidden, weight, labels, …)` runs, and why."""
    check(hidden, weight, labels, Options(**options), chunk_bytes)
    rest = (*Options(**options), chunk_bytes, *_wants(hidden, weight), wide)
    return _linear_cross_entropy.decide(hidden, weight, labels, *rest)


def launch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Our forward pass, whether or not it wins."""
    rest = (*Options(), CHUNK_BYTES, False, False, False)
    return _linear_cross_entropy.by_kernels(hidden, weight, labels, *rest)[0]  # type: ignore[no-any-return]


def launch_backward(dloss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Inputs:
    """The gradients as the forward pass leaves them, then scaled."""
    rest = (*Options(), CHUNK_BYTES, True, True, False)
    _, dh, dw, count = _linear_cross_entropy.by_kernels(hidden, weight, labels, *rest)
    late = is_late(hidden, Options())
    finished.SCALE_IN_PLACE.by_kernels(dh, dloss, count, late, 1.0)
    finished.SCALE_IN_PLACE.by_kernels(dw, dloss, count, late, 1.0 / alpha_of(labels.numel(), late=late))
    return dh, dw


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    generator, kind = generator_for(device, seed), getattr(torch, dtype)
    rows, cols, vocab = shape["rows"], shape["cols"], shape["vocab"]
    hidden = torch.randn(rows, cols, generator=generator, device=device, dtype=kind)
    weight = torch.randn(vocab, cols, generator=generator, device=device, dtype=kind)
    return hidden, weight.mul_(2 * cols**-0.5), random_labels(rows, vocab, device, seed)


def _liger(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Thunk:
    function = peer("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    return lambda: function.apply(hidden, weight, labels)[0]


def _quack(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Thunk:
    return partial(peer("quack.linear_cross_entropy", "chunked_linear_cross_entropy"), hidden, weight, labels)


LINEAR_CROSS_ENTROPY = Op(
    name="linear_cross_entropy",
    summary="cross-entropy of a matrix product against labels, never holding all of it",
    reference=reference,
    call=linear_cross_entropy,
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=launch_backward, kernels=cross_entropy.KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=tuple(
        {"rows": rows, "cols": cols, "vocab": vocab}
        for rows, cols, vocab in (
            *((8192, 4096, 128256), (8192, 2048, 151936), (8192, 1600, 50257)),
            *((4096, 4096, 32000), (512, 2048, 32000)),
        )
    ),
    test_shapes=tuple(
        {"rows": rows, "cols": cols, "vocab": vocab}
        for rows, cols, vocab in ((1, 1, 1), (5, 16, 40), (24, 33, 127), (130, 8, 70), (16, 12, 2064), (8, 24, 4099))
    ),
    peers={"liger": _liger, "quack": _quack},
    directions=("fwd+bwd",),
    batch="",  # a weight's gradient is a sum over all rows
    library_args=lambda *inputs: (*inputs, *Options(), CHUNK_BYTES, True, True, False),
)
