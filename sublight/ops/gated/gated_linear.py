"""A gated block's last projection, act(gate) * up @ weight.T + bias, which does not hold its input for backward.

Left to PyTorch, autograd holds gate, up and their product: the product for the weight's gradient. But the backward
kernel has all that the product takes in its registers, so it writes it once more, over the product's gradient that it
has just read: one more write of memory that is in use anyway, instead of a third of what a block holds.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F

from sublight.backend import private
from sublight.backend.state import PLAIN, who_listens
from sublight.ops.gated.gated import (
    Gate,
    gated,
    gated_backward_again,
    halves,
    halves_backward_again,
    reference,
    why_pytorch,
)
from sublight.ops.record.gradient import vjp

Grads = tuple[torch.Tensor | None, torch.Tensor | None]  # of gate and up, or of the tensor that holds both
__all__ = ["gated", "gated_linear", "holds_product"]


def holds_product(
    gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> bool:
    """Whether autograd would hold gate, up and their product, and nobody traces, wraps or recomputes what we do.

    Who only watches, by a dispatch mode, sees the same ops as are called without him: `sublight.graph` captures what it
    has watched.
    """
    if not torch.is_grad_enabled() or who_listens() in ("compiler", "transform"):
        return False  # a compiler decides itself what is held
    tensors = [x for x in (gate, up, weight, bias) if x is not None]
    return (
        weight.requires_grad  # else nobody needs the product
        and (gate.requires_grad or (up is not None and up.requires_grad))  # else nobody holds gate and up
        and all(type(x) in PLAIN and x.layout == torch.strided for x in tensors)
        and all(x.dtype == gate.dtype and x.device == gate.device for x in tensors)
        and (up is None or up.shape == gate.shape)
        and not torch.is_autocast_enabled(gate.device.type)
        and not _is_checkpointed()
    )


def _is_checkpointed() -> bool:
    """Whether all that is held is made again in backward, up to the last tensor: PyTorch's product is not among it,
    since a linear layer saves before it multiplies, where a function of ours saves when it is done."""
    hooks = private.saved_tensors_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def gated_linear(
    gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, by: Gate
) -> torch.Tensor:
    """F.linear(act(gate) * up, weight, bias), for where `holds_product`; gate alone holds both halves."""
    return _GatedLinear.apply(gate, up, weight, bias, by)  # type: ignore[no-any-return]


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        by: Gate,
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.by = by
        return F.linear(gated(gate, up, by), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        with _as_they_are(dy):
            dy = dy.reshape(-1, dy.shape[-1])
            dh = (dy @ weight).view(*gate.shape[:-1], weight.shape[1])
            grads, h = backward_with_product(dh, gate, up, ctx.by)
            dweight = dy.T @ h.reshape(-1, h.shape[-1])
            return *grads, dweight, dy.sum(0) if ctx.needs_input_grad[3] else None, None


def _as_they_are(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Products of the tensors' own data type, though backward be called under autocast."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def backward_with_product(
    dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, by: Gate
) -> tuple[Grads, torch.Tensor]:
    """The gradients, and the product again, in dh's memory where our kernel runs: dh is used up.

    Where gradients are recorded, for gradients of theirs, PyTorch's ops take over, which have them.
    """
    if torch.is_grad_enabled() or why_pytorch(gate, up):
        if up is None:
            grads = *vjp(lambda x: reference(*halves(x), by), [gate], [dh]), None
            return grads, reference(*halves(gate), by)
        dgate, dup = vjp(lambda gate, up: reference(gate, up, by), [gate, up], [dh])
        return (dgate, dup), reference(gate, up, by)
    if up is None:
        return (halves_backward_again.call(dh, gate, by), None), dh
    return gated_backward_again.call(dh, gate, up, by), dh
