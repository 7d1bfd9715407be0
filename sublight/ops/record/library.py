"""Registers our ops with PyTorch, and calls them: by plan and launches in eager mode, through torch.ops elsewhere.

A call on plain tensors finds its plan by a key and launches, past PyTorch's dispatcher. Compilers, fake tensors and
subclasses of tensors get the registered op, with its fake kernel and its gradient. What no kernel of ours takes, and
what torch.func, forward-mode AD and torch.jit.trace compute with, gets the reference: PyTorch's own ops.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sublight.backend import private
from sublight.backend.device import why_not_here
from sublight.errors import BadInput
from sublight.op import Plan
from sublight.ops.record import kinds
from sublight.ops.record.autocast import as_ours
from sublight.ops.record.call import NativeCall, call_of, guarded, hosted, is_sharded, tensors_of, wants_grad
from sublight.ops.record.gradient import Gradient, vjp
from sublight.ops.record.run import Values, runner

NAMESPACE = torch.library.Library("sublight", "DEF")  # torch.ops.sublight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Registered:
    """An op as PyTorch knows it, and as it is called."""

    schema: str  # its outputs, which have names, are the results and then what the gradient needs
    plan: Callable[..., Plan]  # which kernels take these arguments, and how; its outputs are the schema's
    fake: Callable[..., Values]  # the outputs without data
    reference: Callable[..., Values] | None = None  # PyTorch's composition; None: there is none for this part of an op
    theirs: str = ""  # its name
    why_torch: Callable[..., str] = lambda *args: ""  # the reason to take it; empty: our kernels take these arguments
    results: int | None = None  # so many of the outputs are the caller's; None: all
    plan_results: Callable[..., Plan] | None = None  # a plan of the results alone, where no gradient is wanted
    gradient: Gradient | None = None
    theirs_bytes: Callable[..., int] | None = None  # moved by PyTorch's, where ours costs the host more anyway
    free: tuple[str, ...] = ()  # arguments whose values no plan depends on: launches get them by name
    launch: Callable[..., Values] | None = None  # (plan, *args) -> outputs, where there is more to do than launches
    name: str = field(init=False)
    arguments: tuple[str, ...] = field(init=False)
    kinds: Mapping[str, str] = field(init=False)  # of the arguments, as the schema has them
    outputs: tuple[str, ...] = field(init=False)
    call: Callable[..., Values] = field(init=False)  # results, by our kernels where they win
    native: NativeCall = field(init=False)

    def __post_init__(self) -> None:
        set_ = functools.partial(object.__setattr__, self)
        set_("name", self.schema.split("(")[0])
        parsed = private.parse_schema(self.schema)
        if default := next((each.name for each in parsed.arguments if each.has_default_value()), ""):
            raise BadInput(f"{self.schema}: PyTorch leaves out {default} where it has its default; give it none")
        set_("arguments", tuple(each.name for each in parsed.arguments))
        set_("kinds", {each.name: str(each.type) for each in parsed.arguments})
        set_("outputs", tuple(each.name for each in parsed.returns))
        self._register()
        call, quick = call_of(self)
        set_("call", call)
        set_("native", quick)

    def decide(self, *args: Any) -> Plan:
        """What `call` does with these arguments, and why."""
        kinds.check(self.name, self.kinds, args)
        reason = self.why_torch(*args)
        if any(x.is_neg() for x in tensors_of(args)):
            reason = "a tensor that is negated lazily: its memory holds other numbers"
        if is_sharded(tensors_of(args)):
            reason = "a tensor that is divided among processes (DTensor): PyTorch's ops know how"
        if reason:
            return Plan(provider="torch", theirs=self.theirs, reason=reason)
        kinds.check_devices(self.name, self.kinds, args)
        plan = self.plan_results(*args) if self.plan_results and not wants_grad(args) else self.plan(*args)
        return hosted(self, plan, args)

    def runner(self, plan: Plan) -> Callable[..., Values]:
        """The plan as a function of its arguments."""
        run = functools.partial(self.launch, plan) if self.launch else runner(plan, self.arguments)
        return guarded(run)

    def by_kernels(self, *args: Any) -> Values:
        """All outputs by our kernels, whether or not they win, on whatever device Triton runs them."""
        return self.runner(self.plan(*args))(*args)

    def mine(self, outputs: Values) -> Values:
        """What of the outputs is the caller's."""
        if self.results is None:
            return outputs
        return outputs[0] if self.results == 1 else outputs[: self.results]

    def _register(self) -> None:
        name = f"sublight::{self.name}"
        NAMESPACE.define(self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        NAMESPACE.impl(name, self.by_kernels, "CUDA")
        NAMESPACE.impl(name, self._on_cpu, "CPU")
        torch.library.register_fake(name, self.fake, lib=NAMESPACE)
        if self.gradient is not None:
            torch.library.register_autograd(name, self._backward, setup_context=self._setup_context, lib=NAMESPACE)

    def _on_cpu(self, *args: Any) -> Values:
        """Interpreted kernels in tests; else the reference, with nothing in what is kept for our own gradient."""
        if not why_not_here(tensors_of(args)[0]):
            return self.by_kernels(*args)
        if self.reference is None:
            raise BadInput(f"torch.ops.sublight.{self.name} runs on GPUs alone: call sublight's function of that name")
        results, outputs = as_ours(self.reference, tensors_of(args))(*args), self.fake(*args)
        if not isinstance(outputs, tuple | list):
            return results.contiguous() if isinstance(results, torch.Tensor) else results
        given = results if isinstance(results, tuple) else (results,)
        rest = [x.fill_(math.nan) if x.is_floating_point() else x.zero_() for x in outputs[len(given) :]]
        return (*(x.contiguous() for x in given), *rest)

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Values) -> None:
        assert self.gradient is not None
        ctx.is_reference = bool(why_not_here(tensors_of(inputs)[0]))
        if ctx.is_reference:
            ctx.save_for_backward(*tensors_of(inputs))
            ctx.others = [None if isinstance(x, torch.Tensor) else (x,) for x in inputs]
            return
        outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
        self.gradient.set_up(ctx, self, inputs, outputs)
        if extras := outputs[self.results :] if self.results is not None else ():
            ctx.mark_non_differentiable(*extras)

    def _backward(self, ctx: Any, *grads: Any) -> Any:
        assert self.gradient is not None
        if ctx.is_reference:
            saved = iter(ctx.saved_tensors)
            args = [next(saved) if other is None else other[0] for other in ctx.others]
            return vjp(self.reference, args, grads[: self.results])
        return self.gradient.backward(ctx, self, grads[: self.results])


@functools.cache
def peer(module: str, name: str) -> Any:
    """Somebody else's implementation; ImportError where it is not installed."""
    return getattr(importlib.import_module(module), name)
