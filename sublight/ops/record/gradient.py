"""How an op of ours is differentiated: by another of ours, from what the first one keeps.

Our kernels have no derivative of their own. A gradient that will be differentiated again (`create_graph=True`) is
therefore computed by PyTorch's ops, or refused in one line; it is never cut off in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sublight.backend.state import apply_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradient:
    """Arguments and outputs of an op by name, and the op that takes the results' gradients and gives the arguments'.

    `by` is called with the gradients of the results, then `saves`, `options`, `constants`; None among them stands for
    a result that nobody used, if `by`'s schema has room for it. Each of its outputs is the gradient of one argument, or
    of several that share it (`gives`).
    """

    by: Any  # library.Registered
    saves: tuple[str, ...]  # tensors among the arguments and outputs
    gives: tuple[str | tuple[str, ...], ...]
    options: tuple[str, ...] = ()  # arguments that are no tensors
    constants: tuple[Any, ...] = ()  # the same for every call
    without_first: Callable[..., tuple[Any, ...]] | None = None  # (*grads) where the first result's gradient is None
    partly: Callable[..., Any] | None = None  # (by's call, *its arguments) where a result's gradient is None
    by_torch: Callable[[Mapping[str, Any], tuple[Any, ...]], tuple[Any, ...]] | None = None  # (saved, grads): see below

    def set_up(self, ctx: Any, op: Any, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        """Keep what backward needs; `outputs` are all of the schema's."""
        values = dict(zip(op.arguments, inputs, strict=True)) | dict(zip(op.outputs, outputs, strict=True))
        ctx.save_for_backward(*[values[name] for name in self.saves])
        ctx.others = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
        ctx.set_materialize_grads(False)  # no zeros for a gradient that nobody computed

    def backward(self, ctx: Any, op: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """A gradient for each argument of the op, None where there is none."""
        if grads[0] is None:
            if self.without_first is not None:
                return self.without_first(*grads)
            if all(grad is None for grad in grads):
                return (None,) * len(op.arguments)
        if torch.is_grad_enabled():
            return self._differentiable(ctx, op, grads)
        others = ctx.others
        args = (*grads, *ctx.saved_tensors, *[others[name] for name in self.options], *self.constants)
        is_partly = self.partly is not None and any(grad is None for grad in grads)
        found = self.partly(self.by.call, *args) if is_partly and self.partly else self.by.call(*args)
        return self._by_argument(op, tuple(found) if isinstance(found, tuple | list) else (found,))

    def places(self, op: Any) -> tuple[list[tuple[bool, int]], list[list[int]], list[int], list[Any]]:
        """Saved tensors, given gradients and options by their places, and constants, as the native path has them."""
        saves = [
            (True, op.outputs.index(name)) if name in op.outputs else (False, op.arguments.index(name))
            for name in self.saves
        ]
        gives = [
            [op.arguments.index(name) for name in ((names,) if isinstance(names, str) else names)]
            for names in self.gives
        ]
        return saves, gives, [op.arguments.index(name) for name in self.options], list(self.constants)

    def from_native(self, op: Any, grads: list[Any], saved: list[Any], values: list[Any]) -> tuple[Any, ...]:
        """A backward pass that the native path does not know, or that will be differentiated."""
        given = zip(op.arguments, values, op.native.kinds, strict=True)
        others = {name: value for name, value, kind in given if kind != "t"}
        ctx = SimpleNamespace(saved_tensors=tuple(saved), others=others)
        return self.backward(ctx, op, tuple(grads))

    def _by_argument(self, op: Any, found: tuple[Any, ...]) -> tuple[Any, ...]:
        given: dict[str, Any] = {}
        for names, grad in zip(self.gives, found, strict=True):
            given |= dict.fromkeys((names,) if isinstance(names, str) else names, grad)
        return tuple([given.get(name) for name in op.arguments])

    def _differentiable(self, ctx: Any, op: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """By `by_torch`, which writes the backward pass in PyTorch's ops and gives what `by` gives; else, if all
        arguments were saved, through the reference; else not at all."""
        saved = dict(zip(self.saves, ctx.saved_tensors, strict=True)) | ctx.others
        if self.by_torch is not None:
            return self._by_argument(op, self.by_torch(saved, grads))
        if all(name in saved for name in op.arguments) and op.reference is not None:
            return vjp(op.reference, [saved[name] for name in op.arguments], grads)
        raise NotImplementedError(
            f"sublight.{op.name} has no second derivative: where create_graph=True is needed, call PyTorch's own op"
        )


def vjp(reference: Any, args: list[Any], grads: Iterable[Any]) -> tuple[Any, ...]:
    """The gradient of each argument through PyTorch's composition, itself differentiable where that is wanted."""
    is_wanted = [isinstance(x, torch.Tensor) and x.requires_grad for x in args]
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [
            x.detach().requires_grad_() if wanted and not create_graph else x
            for x, wanted in zip(args, is_wanted, strict=True)
        ]
        outputs = reference(*own)
        both = zip(outputs if isinstance(outputs, tuple) else (outputs,), grads, strict=True)
        pairs = [(y, grad) for y, grad in both if grad is not None and y.requires_grad]
        leaves = [x for x, wanted in zip(own, is_wanted, strict=True) if wanted]
        found = torch.autograd.grad(
            [y for y, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True, create_graph=create_graph
        )
    by_leaf = iter(found)
    return tuple(next(by_leaf) if wanted else None for wanted in is_wanted)


@functools.cache
def function_of(op: Any) -> Callable[..., Any]:
    """The op with its gradient, without the dispatcher: (run, *args) -> results, where run(*args) gives all outputs."""
    gradient, mine = op.gradient, op.mine

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Callable[..., Any], *args: Any) -> Any:
            outputs = run(*args)
            gradient.set_up(ctx, op, args, outputs if isinstance(outputs, tuple | list) else (outputs,))
            return mine(outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (None, *gradient.backward(ctx, op, grads))

    Direct.__name__ = Direct.__qualname__ = op.name
    return apply_of(Direct)  # type: ignore[no-any-return]
