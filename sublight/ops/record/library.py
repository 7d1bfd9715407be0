"""Registers our ops with PyTorch, so that autograd, torch.compile and CUDA graphs know them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Library:
    """The namespace torch.ops.sublight."""

    def __init__(self) -> None:
        self._library = torch.library.Library("sublight", "DEF")

    def op(
        self,
        schema: str,
        *,
        cpu: Callable[..., Any],
        cuda: Callable[..., Any],
        fake: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        setup_context: Callable[..., None] | None = None,
    ) -> Callable[..., Any]:
        """One op: what runs on each device, the shapes it gives, and how its gradient is found.

        What comes back calls it. Plain CUDA tensors in eager mode go straight to the launcher, past the dispatcher
        and its autograd of Python ops; everything else goes through torch.ops.
        """
        name = f"sublight::{schema.split('(')[0]}"
        cuda = on_its_device(cuda)
        self._library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self._library.impl(name, cpu, "CPU")
        self._library.impl(name, cuda, "CUDA")
        torch.library.register_fake(name, fake, lib=self._library)
        if backward is not None:
            torch.library.register_autograd(name, backward, setup_context=setup_context, lib=self._library)
        registered = getattr(torch.ops.sublight, name.split("::")[1]).default
        direct = _function(cuda, backward, setup_context).apply if backward is not None else cuda

        def call(*args: Any) -> Any:
            needs_grad = False
            for x in args:
                if isinstance(x, torch.Tensor):
                    if type(x) not in PLAIN or not x.is_cuda:
                        return registered(*args)
                    needs_grad = needs_grad or x.requires_grad
            if is_listened_to():
                return registered(*args)
            if needs_grad and torch.is_grad_enabled():
                return direct(*args) if backward is not None else registered(*args)
            return cuda(*args)

        return call


def on_its_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current GPU, so that one must be the tensors' own."""

    def call(first: torch.Tensor, *rest: Any) -> Any:
        if first.device.index == torch.cuda.current_device():
            return launch(first, *rest)
        with torch.cuda.device(first.device):
            return launch(first, *rest)

    return call


def is_plain(tensors: list[torch.Tensor]) -> bool:
    """CUDA tensors of no class of their own, of which nobody else wants to hear."""
    return all(type(x) in PLAIN and x.is_cuda for x in tensors) and not is_listened_to()


def is_listened_to() -> bool:
    """Whether somebody traces, wraps or watches what is called: a compiler, fake tensors, functorch, a mode."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _function(
    forward: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None] | None
) -> type[torch.autograd.Function]:
    class Direct(torch.autograd.Function):
        """The same gradient, without the dispatcher."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = forward(*args)
            if setup_context is not None:
                setup_context(ctx, args, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    return Direct


LIBRARY = Library()


@functools.cache
def peer(module: str, name: str) -> Any:
    """Somebody else's implementation; ImportError where it is not installed."""
    return getattr(importlib.import_module(module), name)
