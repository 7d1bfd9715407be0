"""What a module holds beside parameters and children: the values that its code reads, to be compared at every call.

Plain values are compared, alone, in containers, and as attributes of objects such as a config. What an object computes
when it is asked (a method, a property, `__getattr__`) cannot be compared: a module that reads such a thing is left.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch

from sublight.fix.patch import probe

MISSING = object()
DEPTH = 3  # of objects in objects
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
)
Path = tuple[str, ...]


def is_setting(value: Any) -> bool:
    """A plain value, or a container of such, which is compared with what it was."""
    if isinstance(value, dict):
        return all(is_setting(each) for item in value.items() for each in item)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_setting, value))
    return isinstance(value, PLAIN)


def settings(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The module's own."""
    for name, value in vars(module).items():
        if name not in probe.EVERY_MODULES and name not in ("training", "forward") and is_setting(value):
            yield name, copy.deepcopy(value)


def inner(module: torch.nn.Module, names: Collection[str] | None = None) -> Iterator[tuple[Path, Any]]:
    """Of objects that the module holds, the plain values whose names occur in its class's code, or are these."""
    for holder, value in _held(module):
        yield from _inside(value, (holder,), _in_class(module) if names is None else names)


def _in_class(module: torch.nn.Module) -> set[str]:
    classes = [each for each in type(module).__mro__ if not each.__module__.startswith("torch.nn.modules.module")]
    functions = [inspect.unwrap(each) for kind in classes for each in vars(kind).values() if inspect.isfunction(each)]
    return {name for function in functions if hasattr(function, "__code__") for name in function.__code__.co_names}


def objects(module: torch.nn.Module, names: Collection[str]) -> Iterator[Any]:
    """Those that code with these names can reach in it."""
    todo = [(value, DEPTH) for name, value in _held(module) if name in names]
    while todo:
        value, depth = todo.pop()
        yield value
        found = (getattr(value, name, None) for name in _names(value) if name in names) if depth else ()
        todo += [(each, depth - 1) for each in found if not is_setting(each)]


def unfollowed(module: torch.nn.Module, names: Collection[str]) -> str:
    """What code with these names may read of the module that cannot be compared; empty where there is nothing."""
    return next(
        (why for holder, value in _held(module) if holder in names and (why := _why_not(value, holder, names))), ""
    )


def _held(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in probe.EVERY_MODULES and name != "forward" and not is_setting(value):
            yield name, value


def _why_not(value: Any, path: str, names: Collection[str], depth: int = DEPTH) -> str:
    if isinstance(value, torch.Tensor) or (callable(value) and not isinstance(value, torch.nn.Module)):
        return ""  # a proof refuses tensors, and functions are read
    if isinstance(value, torch.nn.Module):
        return f"reads {path}, a module that is no child of it"
    if isinstance(value, dict | list | tuple | set | frozenset):
        return f"reads {path}, which holds more than plain values"
    kind = type(value)
    if kind.__module__.partition(".")[0] in ("torch", "builtins"):
        return ""
    if any("__getattr__" in vars(each) for each in kind.__mro__):
        return f"reads {path}, which computes its attributes"
    for name in sorted(names):
        found = inspect.getattr_static(kind, name, None)
        if not isinstance(found, types.MemberDescriptorType | type(None)) and not is_setting(found):
            return f"reads {path}.{name}, which is computed"
        if isinstance(found, types.FunctionType):
            return f"calls {path}.{name}"
        deeper = getattr(value, name, None) if depth and name in _names(value) else None
        if not is_setting(deeper) and (why := _why_not(deeper, f"{path}.{name}", names, depth - 1)):
            return why
    return ""


def _inside(holder: Any, path: Path, names: Collection[str]) -> Iterator[tuple[Path, Any]]:
    for name in _names(holder):
        value = getattr(holder, name, MISSING) if name in names else MISSING
        if is_setting(value):
            yield (*path, name), copy.deepcopy(value)
        elif value is not MISSING and len(path) < DEPTH:
            yield from _inside(value, (*path, name), names)


def _names(holder: Any) -> list[str]:
    slots = [name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(holder, "__dict__", ()), *slots]
