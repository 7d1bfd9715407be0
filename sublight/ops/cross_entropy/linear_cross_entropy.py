"""Cross-entropy of hidden @ weight.T against labels, without ever holding all the logits.

Some rows at a time: their logits by a matrix product into one buffer, our cross-entropy kernel turns them into their
gradient where they lie, and two more products take that to the gradients of hidden and weight. So the gradients are
finished in the forward pass, and the backward pass only scales them, where there is anything to scale by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.loss import linear_cross_entropy as cost
from sublight.errors import BadInput
from sublight.op import Choice, Op
from sublight.ops.cross_entropy import cross_entropy
from sublight.ops.cross_entropy import launch as launches
from sublight.ops.cross_entropy.cross_entropy import Reduction, random_labels
from sublight.ops.cross_entropy.kernels import KERNELS
from sublight.ops.cross_entropy.launch import OPTIONS_SCHEMA, Options, is_late
from sublight.ops.cross_entropy.linear_plan import MOST_ROUNDINGS, chunks_of, parts_of
from sublight.ops.kernels.rows import as_rows, generator_for, why_torch
from sublight.ops.record.library import LIBRARY, peer
from sublight.timing import Thunk

CHUNK_BYTES = 352 * 2**20  # of logits held at once

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, wide: bool = False, **options: Any
) -> torch.Tensor:
    logits = hidden @ weight.T
    return cross_entropy.reference(logits.to(_loss_dtype(logits, wide)), labels, **options)


def _loss_dtype(x: torch.Tensor, wide: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32) if wide else x.dtype


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
    cross_entropy.check(hidden, labels, options)


def _kernels(
    x: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, count: torch.Tensor, options: Options, wanted: bool
) -> None:
    """A chunk's logits become their gradient, by our kernels."""
    launches.launch_rows(x, labels, options, losses=losses, d=x if wanted else None, count=count, counted=True)


def _composed(
    x: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, count: torch.Tensor, options: Options, wanted: bool
) -> None:
    """The same by PyTorch's ops."""
    loss, d = cross_entropy.composed(x, labels, options)
    losses.copy_(loss)
    if wanted:
        x.copy_(d / count.clamp(min=1) if options.reduction == "mean" and not is_late(x, options) else d)


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    options: Options,
    chunk_bytes: int,
    wants_hidden: bool,
    wants_weight: bool,
    wide: bool = False,
    *,
    dloss: torch.Tensor | None = None,
    entropy: Callable[..., None] = _kernels,
) -> Results:
    """Loss, gradients of hidden and weight (of no size where not wanted), count of labels.

    With `dloss`, one number a row, the rows' gradients are scaled by it: what a loss without reduction needs, since the
    weight's gradient is a sum over rows.
    """
    h, w = as_rows(hidden.detach()), as_rows(weight.detach())
    target = labels.reshape(-1).contiguous()
    rows, classes = h.shape[0], w.shape[0]
    wanted = wants_hidden or wants_weight
    losses = launches.new_losses(h, rows, options)
    count = launches.new_count(h, options)
    if options.reduction == "mean":
        count.copy_((target != options.ignore_index).sum())
    dh, dw = _room(h, wants_hidden), _room(w, wants_weight)
    gpu = {"features": h.shape[1], "multiprocessors": facts(h).multiprocessors}
    chunks = list(chunks_of(rows, classes * h.element_size(), chunk_bytes, **gpu))
    often = len(chunks) > MOST_ROUNDINGS or (len(chunks) > 1 and 4 * w.numel() <= chunk_bytes)
    exact = wants_weight and h.element_size() == 2 and often
    grown = torch.empty_like(dw, dtype=torch.float32) if exact else dw
    room = 16 * cdiv(classes, 16)  # so that every row starts at a 16-byte boundary
    parts = parts_of(classes)
    buffer = h.new_empty(max(chunk.stop - chunk.start for chunk in chunks), room)
    for chunk in chunks:
        logits = buffer[: chunk.stop - chunk.start, :classes]
        for part in parts:
            torch.mm(h[chunk], w[part].T, out=logits[:, part])
        entropy(logits, target[chunk], losses[chunk], count, options, wanted)
        if dloss is not None and entropy is _kernels:
            launches.launch_scale(logits, dloss.reshape(-1)[chunk], count, False)
        elif dloss is not None:
            logits.mul_(dloss.reshape(-1)[chunk].unsqueeze(-1))
        for i, part in enumerate(parts):
            d = logits[:, part]
            if wants_hidden:
                torch.addmm(dh[chunk], d, w[part], beta=float(i > 0), out=dh[chunk])
            if wants_weight:
                _add_product(grown[part], d.T, h[chunk], beta=float(chunk.start > 0), alpha=_alpha(h, options))
    if exact:
        dw.copy_(grown)
    dtype = _loss_dtype(h, wide)
    if options.reduction == "none":
        return losses.view(labels.shape), dh.view(hidden.shape if wants_hidden else (0,)), dw, count
    if entropy is _kernels:
        loss = launches.launch_total(losses, target, count, dtype, options, counted=True)
    else:
        loss = (losses.sum() if options.reduction == "sum" else losses.sum() / count).to(dtype)
    return loss, dh.view(hidden.shape if wants_hidden else (0,)), dw, count


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float, alpha: float) -> None:
    """total = beta * total + alpha * a @ b, where total may be fp32 and a and b 16-bit."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, alpha=alpha, out=total)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, alpha=alpha, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, alpha=alpha, out=total)


def _alpha(h: torch.Tensor, options: Options) -> float:
    """What the weight's gradient is multiplied by until the backward pass: a power of two, so exact.

    Only where one over the count waits for that: fp16 then holds a sum over rows, which must neither overflow nor, with
    a loss scale yet to come, vanish. This keeps it at 256 times a mean's gradient.
    """
    return 2.0 ** min(0, 8 - math.ceil(math.log2(h.shape[0]))) if is_late(h, options) else 1.0


def launch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Our forward pass, whatever `choose` would say."""
    return run(hidden, weight, labels, Options(), CHUNK_BYTES, False, False)[0]


def launch_backward(
    dloss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients as the forward pass leaves them, then scaled."""
    options = Options()
    _, dh, dw, count = run(hidden, weight, labels, options, CHUNK_BYTES, True, True)
    h, late = as_rows(hidden), is_late(hidden, options)
    launches.launch_scale(dh, dloss, count, late)
    launches.launch_scale(dw, dloss, count, late, 1.0 / _alpha(h, options))
    return dh, dw


def _why_torch(hidden: torch.Tensor, weight: torch.Tensor) -> str:
    if reason := why_torch(hidden, weight):
        return reason
    return "more classes than a row may have" if weight.shape[0] > 2**18 or weight.shape[0] == 0 else ""


def choose(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Any) -> Choice:
    """What `linear_cross_entropy(hidden, weight, labels)` runs, and why."""
    if reason := _why_torch(hidden, weight):
        return Choice(provider="torch", kernel="torch.nn.functional.cross_entropy", reason=reason)
    logits = hidden.new_empty(1, weight.shape[0], device="meta")
    name, _ = launches.kernel_for(logits, logits, Options())
    return Choice(
        provider="sublight", kernel=f"_{name}_kernel", reason="some rows' logits at a time, between torch's products"
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

    At most `chunk_bytes` of logits are held at once (or 128 rows of them). Where that makes more than eight chunks, or
    as much memory holds it, the gradient of a 16-bit weight is added up in fp32, in twice its memory. A `wide` loss is
    given in float32 where hidden is of 16 bits, as that of logits cast to float32 is.
    """
    options = Options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check(hidden, weight, labels, options, chunk_bytes)
    if _why_torch(hidden, weight):
        return reference(hidden, weight, labels, wide=wide, **options._asdict())
    if wide and reduction == "none":
        raise BadInput("a wide loss is one number: use reduction='mean' or 'sum'")
    grads = torch.is_grad_enabled()
    wants = (grads and hidden.requires_grad, grads and weight.requires_grad)
    return _linear_cross_entropy(hidden, weight, labels, *options, chunk_bytes, *wants, wide)[0]  # type: ignore[no-any-return]


def _arguments(rest: tuple[Any, ...]) -> tuple[Options, Any, Any, Any, Any]:
    return Options(*rest[:5]), *rest[5:9], *(False,) * (9 - len(rest))


def _cuda(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: Any) -> Results:
    options = Options(*rest[:5])
    if options.reduction == "none":  # the gradient needs the loss's own first: the backward pass has it
        return run(hidden, weight, labels, options, rest[5], False, False)
    return run(hidden, weight, labels, *_arguments(rest))


def _cpu(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: Any) -> Results:
    options = Options(*rest[:5])
    if options.reduction == "none":
        return run(hidden, weight, labels, options, rest[5], False, False, entropy=_composed)
    return run(hidden, weight, labels, *_arguments(rest), entropy=_composed)


def _fake(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: Any) -> Results:
    options, _, wants_hidden, wants_weight, wide = _arguments(rest)
    each = options.reduction == "none"
    loss = hidden.new_empty(labels.shape if each else (), dtype=_loss_dtype(hidden, wide and not each))
    dh, dw = _room(hidden, wants_hidden and not each), _room(weight, wants_weight and not each)
    return loss, dh, dw, launches.new_count(hidden, options)


def _room(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format) if wanted else x.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    hidden, weight, labels, *rest = inputs
    ctx.save_for_backward(hidden, weight, labels)
    ctx.rest = rest
    ctx.gradients = output[1:] if Options(*rest[:5]).reduction != "none" else None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    nothing = (None,) * 10
    if dloss is None:
        return None, None, *nothing
    hidden, weight, labels = ctx.saved_tensors
    options = Options(*ctx.rest[:5])
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    # the gradients are scaled where they lie and then belong to whoever asked: a second backward pass needs others
    found, ctx.gradients = ctx.gradients, None
    if options.reduction == "none":
        dh, dw = _gradients(dloss, hidden, weight, labels, *ctx.rest[:6], wants_hidden, wants_weight)
    else:
        if found is None or (wants_hidden and not found[0].numel()) or (wants_weight and not found[1].numel()):
            again = (hidden.detach(), weight.detach(), labels)
            found = _linear_cross_entropy(*again, *ctx.rest[:6], wants_hidden, wants_weight, False)[1:]
        dh, dw, count = found
        late = is_late(hidden, options)
        if wants_hidden:
            dh = cross_entropy.scaled(dh, dloss, count, late)
        if wants_weight:
            factor = 1.0 / _alpha(hidden.reshape(-1, hidden.shape[-1]), options)
            dw = cross_entropy.scaled(dw, dloss, count, late, factor)
    return dh if wants_hidden else None, dw if wants_weight else None, *nothing


def _fake_gradients(
    dloss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _room(hidden, rest[6]), _room(weight, rest[7])


def _gradients_by(entropy: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def gradients(
        dloss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return run(hidden, weight, labels, *_arguments(rest), dloss=dloss, entropy=entropy)[1:3]

    return gradients


_OPTIONS = f"{OPTIONS_SCHEMA}, int chunk_bytes"
_linear_cross_entropy = LIBRARY.op(
    f"linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, {_OPTIONS}, "
    "bool wants_hidden, bool wants_weight, bool wide=False) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_gradients = LIBRARY.op(
    f"linear_cross_entropy_gradients(Tensor dloss, Tensor hidden, Tensor weight, Tensor labels, {_OPTIONS}, "
    "bool wants_hidden, bool wants_weight) -> (Tensor, Tensor)",
    cpu=_gradients_by(_composed),
    cuda=_gradients_by(_kernels),
    fake=_fake_gradients,
)


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
    launch=launch,
    launch_backward=launch_backward,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=KERNELS,
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
    library_args=lambda *inputs: (*inputs, *Options(), CHUNK_BYTES, True, True, False),
)
