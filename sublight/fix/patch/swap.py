"""A forward of ours on one module, and the module's own again where the module is no longer what was proven.

What a proof read of a module is noted with the swap: its class's forward, its settings, what it holds of tensors, the
children whose calls are left out. Every call compares; a module that was changed runs its own code and says so once.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from sublight.backend.private import function_modes, has_any_global_hook
from sublight.fix.patch import held, outside, rewrite
from sublight.fix.patch.outside import Functions, Globals
from sublight.fix.patch.probe import is_plain_tensor, is_sharded
from sublight.fix.patch.record import Swap

MARK = "__sublight__"  # on the function behind a swapped forward: the forward that the instance had before, or None
MISSING = object()
REPLICATE = "_replicate_for_data_parallel"  # of torch.nn.Module


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """What a proof read of one module."""

    own: Any  # its class's forward
    settings: tuple[tuple[str, Any], ...] = ()
    inner: tuple[
        tuple[tuple[str, ...], Any], ...
    ] = ()  # of objects that it holds, such as a config: what its code reads
    outside: Globals = ()  # that its code reads
    partials: tuple[tuple[str, held.Partial], ...] = ()  # that it holds; a graph is guarded by its compiler
    bound: Globals = ()  # likewise; a graph is guarded by its compiler
    functions: Functions = ()  # of that code
    held: tuple[tuple[str, str, str], ...] = ()  # kind, name of a parameter or buffer, what there is: `_tensor`
    hidden: tuple[tuple[str, Noted], ...] = ()  # children that our forward does not call

    def changed(self, module: Any) -> str:
        """What is another thing now than when the module was patched; empty where nothing is."""
        if not torch.compiler.is_dynamo_compiling() and type(module).forward is not self.own:
            return "its class's forward"
        for name, value in self.settings:
            found = getattr(module, name, MISSING)
            if found is not value and (found is MISSING or found != value):
                return name
        if self.partials and not torch.compiler.is_dynamo_compiling():
            for name, partial in self.partials:
                if getattr(module, name, MISSING) != partial:
                    return name
        for path, value in self.inner:
            found = functools.reduce(_attribute, path, module)
            if found is not value and (found is MISSING or found != value):
                return ".".join(path)
        if what := outside.changed(self.outside, self.bound, self.functions):
            return what
        for kind, name, what in self.held:
            if _tensor(getattr(module, kind).get(name)) != what:
                return name
        for name, noted in self.hidden:
            child = getattr(module, name, None)
            if not isinstance(child, torch.nn.Module):  # gone, or a function took its place
                return name
            if what := noted.changed(child):
                return name if what == "its class's forward" else f"{name}.{what}"
            if "forward" in child.__dict__ and not is_patched(child):
                return f"{name}.forward"
            if not torch.compiler.is_dynamo_compiling() and not is_called_plainly(child):
                return f"{name}.__call__"
        if self.hidden and has_any_global_hook():
            return "a hook for all modules"
        return ""


def note(module: torch.nn.Module, swap: Swap) -> Noted:
    """What `swap` counts on."""
    children = tuple((name, _noted(module.get_submodule(name))) for name in swap.hides)
    if swap.trusts:
        return replace(_noted_in_code(module, swap.trusts), hidden=children)
    if not swap.reads_settings:  # its source was read, and its globals are live
        chain = rewrite.layers(type(module).forward)
        return Noted(own=type(module).forward, hidden=children, functions=tuple((f, outside.parts(f)) for f in chain))
    return replace(_noted(module), hidden=children)


def _noted(module: torch.nn.Module) -> Noted:
    """All that a proof of this module's own behaviour read."""
    read = outside.of_module(module)
    return Noted(
        own=type(module).forward,
        settings=(*held.settings(module), *_of_class(module, read.names)),
        inner=tuple(held.inner(module, read.in_code)),
        partials=tuple(held.partials(module)),
        outside=tuple(read.globals.values()),
        bound=(*read.bound.values(), *_functional(type(module).forward)),
        functions=tuple(read.functions.items()),
        held=_held(module),
    )


def _noted_in_code(module: torch.nn.Module, trusts: tuple[str, ...]) -> Noted:
    """What the code of its class reads, without that of the packages that are trusted."""
    read = outside.of_module(module, trusts)
    own = [each for each in held.settings(module) if each[0] in read.in_code]
    return Noted(
        own=type(module).forward,
        settings=(*own, *_of_class(module, read.names)),
        inner=tuple(held.inner(module, read.in_code)),
        partials=tuple(held.partials(module)),
        outside=tuple(read.globals.values()),
        bound=(*read.bound.values(), *_functional(type(module).forward)),
        functions=tuple(read.functions.items()),
    )


def _functional(forward: Any) -> Iterator[tuple[outside.Space, str, Any]]:
    """What a forward of PyTorch's own calls of torch.nn.functional: somebody may replace it there."""
    if getattr(forward, "__module__", "").startswith("torch.nn.modules."):
        space = vars(torch.nn.functional)
        yield from ((space, name, space[name]) for name in forward.__code__.co_names if callable(space.get(name)))


def _of_class(module: torch.nn.Module, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What its code reads of its class, which an instance may come to hide; a property's code was read as well.

    Not its forward, which is noted by itself, and which a swap hides: code that calls `super().forward(x)` names it.
    """
    for name in sorted(set(names) - set(vars(module)) - {"forward"}):
        if not isinstance(inspect.getattr_static(type(module), name, None), property):
            yield name, getattr(module, name, MISSING)


def _attribute(holder: Any, name: str) -> Any:
    return getattr(holder, name, MISSING)


def _held(module: torch.nn.Module) -> tuple[tuple[str, str, str], ...]:
    kinds = ("_parameters", "_buffers")
    return tuple((kind, name, _tensor(x)) for kind in kinds for name, x in vars(module)[kind].items())


def _tensor(x: torch.Tensor | None) -> str:
    return "none" if x is None else "plain" if is_plain_tensor(x) or is_sharded(x) else "of its own kind"


def apply(module: torch.nn.Module, swap: Swap) -> None:
    """Set the module's forward; a function of its own, so that each module remembers what it had."""
    function = guarded(swap.forward, note(module, swap))
    function.__dict__[MARK] = module.__dict__.get("forward")
    function.__dict__["__sublight_rule__"] = swap.rule
    module.forward = types.MethodType(function, module)
    vars(module)[REPLICATE] = types.MethodType(_replica, module)


def _replica(self: Any) -> Any:
    """A replica, as torch.nn.DataParallel makes them, with its class's forward: ours is bound to the module itself."""
    replica = getattr(type(self), REPLICATE)(self)
    for name in ("forward", REPLICATE):
        vars(replica).pop(name, None)
    return replica


_replica.__name__ = REPLICATE  # by which pickle finds the class's own again


def guarded(ours: Callable[..., Any], noted: Noted) -> Any:
    """Our forward, under the signature that it has, for a module that is as noted; else the module's own."""
    warned: list[str] = []

    @functools.wraps(ours)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if what := noted.changed(self):
            if not warned and not torch.compiler.is_dynamo_compiling():
                warned.append(what)
                warnings.warn(
                    f"{type(self).__name__} has changed since sublight.patch ({what}), so its own forward runs: "
                    "patch the model again",
                    stacklevel=2,
                )
            return type(self).forward(self, *args, **kwargs)
        tensors = (*args, *kwargs.values(), *(getattr(self, kind).get(name) for kind, name, _ in noted.held))
        if any(isinstance(x, torch.Tensor) and not is_plain_tensor(x) for x in tensors):
            return type(self).forward(self, *args, **kwargs)  # a tensor that may have ways of its own
        if _is_intercepted():
            return type(self).forward(self, *args, **kwargs)  # who listens to torch's functions hears its own
        if _may_not_save(tensors):
            return type(self).forward(self, *args, **kwargs)  # its first op may make one that autograd takes
        return ours(self, *args, **kwargs)

    forward.__name__ = "forward"  # by which pickle finds the class's own again
    return forward


def _is_intercepted() -> bool:
    """Whether a user's TorchFunctionMode is on; those of PyTorch (a default device) and ours miss nothing."""
    if torch.compiler.is_compiling():
        return False
    return any(type(each).__module__.partition(".")[0] not in ("torch", "sublight") for each in function_modes())


def _may_not_save(tensors: Iterable[Any]) -> bool:
    """Where gradients are recorded: whether one was made in inference mode, which an op of ours would save."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return any(isinstance(x, torch.Tensor) and x.is_inference() for x in tensors)


def undo(module: torch.nn.Module) -> bool:
    if not is_patched(module):
        return False
    before = module.__dict__["forward"].__func__.__dict__[MARK]
    module.__dict__.pop(REPLICATE, None)
    if before is None:
        del module.__dict__["forward"]
    else:
        module.forward = before
    return True


def is_patched(module: torch.nn.Module) -> bool:
    return MARK in getattr(getattr(module.__dict__.get("forward"), "__func__", None), "__dict__", {})


def is_called_plainly(module: torch.nn.Module) -> bool:
    """Whether a call of it is its hooks and its forward, and nothing else."""
    call: Any = torch.nn.Module.__call__
    return type(module).__call__ is call and call.__module__ == torch.nn.Module.__module__


def is_its_own(module: torch.nn.Module) -> bool:
    """Whether its forward is its class's; a loaded pickle of a patched module has that bound to the instance."""
    given = module.__dict__.get("forward")
    return given is None or (
        getattr(given, "__func__", None) is type(module).forward and getattr(given, "__self__", None) is module
    )
