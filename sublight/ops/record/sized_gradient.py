"""Gradients that need an argument's sizes and not its values, so that nothing has to be kept for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sublight.ops.record.gradient import Gradient


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizedGradient(Gradient):
    """A `Gradient` whose `options` and `by_torch` may name sizes as well."""

    sizes: Callable[..., Mapping[str, Any]] = lambda *args: {}  # (*the op's arguments) -> by name
    differentiable: int | None = None  # so many of the results have a gradient, the others are whole numbers; None: all

    def set_up(self, ctx: Any, op: Any, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        Gradient.set_up(self, ctx, op, inputs, outputs)
        ctx.others |= self.sizes(*inputs)

    def backward(self, ctx: Any, op: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        return Gradient.backward(self, ctx, op, grads[: self.differentiable])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Function:
    call: Callable[..., torch.Tensor]


def gradient_by(
    call: Callable[..., torch.Tensor],
    *,
    of: str,
    options: tuple[str, ...] = (),
    sizes: Callable[..., Mapping[str, Any]] = lambda *args: {},
) -> SizedGradient:
    """The gradient of one argument, `call(dy, *options)`: a view of dy, or an op that has a derivative of its own.

    What it gives can be differentiated again, and so on.
    """
    return SizedGradient(
        by=_Function(call=call),
        saves=(),
        gives=(of,),
        options=options,
        sizes=sizes,
        by_torch=lambda saved, grads: (call(*grads, *[saved[name] for name in options]),),
    )
