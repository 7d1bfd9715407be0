"""A forward of ours on one module, and the module's own again where the module is no longer what was proven.

What a proof read of a module is noted with the swap: its class's forward, its settings, what it holds of tensors, the
children whose calls are left out. Every call compares; a module that was changed runs its own code and says so once.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sublight.fix.patch import probe
from sublight.fix.patch.record import Swap

MARK = "__sublight__"  # on the function behind a swapped forward: the forward that the instance had before, or None
MISSING = object()
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    tuple,
    type(None),
    torch.dtype,
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """What a proof read of one module."""

    own: Any  # its class's forward
    settings: tuple[tuple[str, Any], ...] = ()
    inner: tuple[tuple[str, str, Any], ...] = ()  # an object that it holds, such as a config; what its code reads of it
    held: tuple[tuple[str, str, bool], ...] = ()  # kind, name of a parameter or buffer, whether there is one
    hidden: tuple[tuple[str, Noted], ...] = ()  # children that our forward does not call

    def changed(self, module: Any) -> str:
        """What is another thing now than when the module was patched; empty where nothing is."""
        if not torch.compiler.is_dynamo_compiling() and type(module).forward is not self.own:
            return "its class's forward"
        for name, value in self.settings:
            found = getattr(module, name, MISSING)
            if found is not value and found != value:
                return name
        for holder, name, value in self.inner:
            found = getattr(getattr(module, holder, None), name, MISSING)
            if found is not value and found != value:
                return f"{holder}.{name}"
        for kind, name, is_there in self.held:
            if (getattr(module, kind).get(name) is not None) != is_there:
                return name
        for name, noted in self.hidden:
            child = getattr(module, name, None)
            if child is None or (what := noted.changed(child)):
                return name if child is None or what == "its class's forward" else f"{name}.{what}"
            if "forward" in child.__dict__ and not is_patched(child):
                return f"{name}.forward"
        if self.hidden and torch.nn.modules.module._has_any_global_hook():
            return "a hook for all modules"
        return ""


def note(module: torch.nn.Module, swap: Swap) -> Noted:
    """What `swap` counts on."""
    children = ((name, module.get_submodule(name)) for name in swap.hides)
    return Noted(
        own=type(module).forward,
        settings=_settings(module) if swap.reads_settings else (),
        inner=tuple(_inner(module)) if swap.reads_settings else (),
        held=_held(module) if swap.reads_settings else (),
        hidden=tuple(
            (name, Noted(own=type(child).forward, settings=_settings(child), held=_held(child)))
            for name, child in children
        ),
    )


def _settings(module: torch.nn.Module) -> tuple[tuple[str, Any], ...]:
    own = ((name, value) for name, value in vars(module).items() if name not in probe.EVERY_MODULES)
    return tuple(
        (name, value) for name, value in own if name not in ("training", "forward") and isinstance(value, PLAIN)
    )


def _inner(module: torch.nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Of objects that the module holds, the plain values whose names occur in its class's code."""
    classes = [each for each in type(module).__mro__ if not each.__module__.startswith("torch.nn.modules.module")]
    functions = [inspect.unwrap(each) for kind in classes for each in vars(kind).values() if inspect.isfunction(each)]
    names = {name for function in functions if hasattr(function, "__code__") for name in function.__code__.co_names}
    for holder, value in vars(module).items():
        if holder in probe.EVERY_MODULES or isinstance(value, PLAIN) or not hasattr(value, "__dict__"):
            continue
        for name, inside in vars(value).items():
            if name in names and isinstance(inside, PLAIN):
                yield holder, name, inside


def _held(module: torch.nn.Module) -> tuple[tuple[str, str, bool], ...]:
    kinds = ("_parameters", "_buffers")
    return tuple((kind, name, x is not None) for kind in kinds for name, x in vars(module)[kind].items())


def apply(module: torch.nn.Module, swap: Swap) -> None:
    """Set the module's forward; a function of its own, so that each module remembers what it had."""
    function = guarded(swap.forward, note(module, swap))
    function.__dict__[MARK] = module.__dict__.get("forward")
    function.__dict__["__sublight_rule__"] = swap.rule
    module.forward = types.MethodType(function, module)


def guarded(ours: Callable[..., Any], noted: Noted) -> Any:
    """Our forward, under the signature that it has, for a module that is as noted; else the module's own."""
    told: list[str] = []

    @functools.wraps(ours)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if what := noted.changed(self):
            if not told and not torch.compiler.is_dynamo_compiling():
                told.append(what)
                warnings.warn(
                    f"{type(self).__name__} has changed since sublight.patch ({what}), so its own forward runs: "
                    "patch the model again",
                    stacklevel=2,
                )
            return type(self).forward(self, *args, **kwargs)
        return ours(self, *args, **kwargs)

    forward.__name__ = "forward"  # by which pickle finds the class's own again
    return forward


def undo(module: torch.nn.Module) -> bool:
    if not is_patched(module):
        return False
    before = module.__dict__["forward"].__func__.__dict__[MARK]
    if before is None:
        del module.__dict__["forward"]
    else:
        module.forward = before
    return True


def is_patched(module: torch.nn.Module) -> bool:
    return MARK in getattr(getattr(module.__dict__.get("forward"), "__func__", None), "__dict__", {})


def is_its_own(module: torch.nn.Module) -> bool:
    """Whether its forward is its class's; a loaded pickle of a patched module has that bound to the instance."""
    given = module.__dict__.get("forward")
    return given is None or (
        getattr(given, "__func__", None) is type(module).forward and getattr(given, "__self__", None) is module
    )
