"""What a module holds beside parameters and children: the values that its code reads, to be compared at every call.

Plain values are compared, alone, in containers, and as attributes of objects such as a config. What an object computes
when it is asked (a method, a property, `__getattr__`) cannot be compared: a module that reads such a thing is left.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sublight.fix.patch import probe

MISSING = object()
DEPTH = 3  # of objects in objects
DEEPEST = 20  # of containers in containers; one that holds itself has no end
ATOMS = (bytes, range, slice, type(...), object)
LIBRARIES = ("builtins", "types", "collections", "enum", "torch", "numpy")  # whose classes compute as everybody expects
OPERATORS = frozenset(  # by which an object runs code of its own without being called by name
    f"__{name}__"
    for name in (
        *("bool", "len", "getitem", "contains", "iter", "next", "call", "enter", "exit", "missing", "get"),
        *("float", "int", "index", "complex", "round", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"),
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "torch_function"),
        *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul", "rand", "ror", "rxor"),
    )
)
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


def is_setting(value: Any, depth: int = DEEPEST) -> bool:
    """A plain value, or a container of such, which is compared with what it was."""
    if not depth or computes(type(value)):
        return False
    if isinstance(value, dict):
        return all(is_setting(each, depth - 1) for item in value.items() for each in item)
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_setting(each, depth - 1) for each in value)
    return isinstance(value, PLAIN)


def computes(kind: type, trusted: tuple[str, ...] = ()) -> str:
    """An operator that somebody has written for a class; none for most."""
    theirs = (each for each in kind.__mro__ if each.__module__.partition(".")[0] not in (*LIBRARIES, *trusted))
    return next((name for each in theirs for name in vars(each) if name in OPERATORS), "")


def settings(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The module's own."""
    for name, value in vars(module).items():
        if name not in probe.EVERY_MODULES and name not in ("training", "forward") and is_setting(value):
            yield name, copy.deepcopy(value)


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """What a functools.partial was made of; equal to one that is made of the same."""

    function: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        is_one = isinstance(other, functools.partial) and other.func is self.function
        return is_one and (other.args, other.keywords) == (self.args, self.keywords)  # type: ignore[attr-defined]


def partials(module: torch.nn.Module) -> Iterator[tuple[str, Partial]]:
    """The module's own."""
    for name, value in vars(module).items():
        if isinstance(value, functools.partial):
            yield name, Partial(value.func, value.args, dict(value.keywords))


def inner(module: torch.nn.Module, names: Collection[str]) -> Iterator[tuple[Path, Any]]:
    """Of objects that the module holds: their classes, and the plain values that code with these names can reach."""
    for holder, value in _held(module):
        if holder in names:
            yield (holder, "__class__"), type(value)
        yield from _inside(value, (holder,), names)


def objects(module: torch.nn.Module, names: Collection[str]) -> Iterator[Any]:
    """Those that code with these names can reach in it."""
    todo = [(value, DEPTH) for name, value in _held(module) if name in names]
    while todo:
        value, depth = todo.pop()
        yield value
        found = (getattr(value, name, None) for name in names_in(value) if name in names) if depth else ()
        todo += [(each, depth - 1) for each in found if not is_setting(each)]


def unfollowed(module: torch.nn.Module, names: Collection[str], trusted: tuple[str, ...] = ()) -> str:
    """What code with these names may read of the module that cannot be compared; empty where there is nothing."""
    found = (_why_not(value, holder, names, trusted) for holder, value in _held(module) if holder in names)
    return next(filter(None, found), "")


def _held(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in probe.EVERY_MODULES and name != "forward" and not is_setting(value):
            yield name, value


def _why_not(value: Any, path: str, names: Collection[str], trusted: tuple[str, ...], depth: int = DEPTH) -> str:
    if isinstance(value, torch.Tensor) or (callable(value) and not isinstance(value, torch.nn.Module)):
        return ""  # a proof refuses tensors, and functions are read
    if isinstance(value, torch.nn.Module):
        return f"reads {path}, a module that is no child of it"
    if isinstance(value, dict | list | tuple | set | frozenset):
        return f"reads {path}, which holds more than plain values"
    kind = type(value)
    if kind in ATOMS or (kind.__module__.partition(".")[0] == "torch" and kind.__dictoffset__ == 0):
        return ""  # a device; an optimizer has numbers that a schedule changes
    if not all(map(_is_python, kind.__mro__[:-1])):
        return f"reads {path}, a {kind.__name__}, which cannot be compared"
    if name := computes(kind, trusted):
        return f"reads {path}, which has a {name} of its own"
    if any("__getattr__" in vars(each) for each in kind.__mro__):
        return f"reads {path}, which computes its attributes"
    for name in sorted(names):
        found = inspect.getattr_static(kind, name, None)
        if not isinstance(found, types.MemberDescriptorType | type(None)) and not is_setting(found):
            return f"reads {path}.{name}, which is computed"
        if isinstance(found, types.FunctionType):
            return f"calls {path}.{name}"
        deeper = getattr(value, name, None) if depth and name in names_in(value) else None
        if not is_setting(deeper) and (why := _why_not(deeper, f"{path}.{name}", names, trusted, depth - 1)):
            return why
    return ""


def _is_python(kind: type) -> bool:
    """Whether its instances hold what they hold in attributes: not an array, a queue or another's dictionary."""
    return kind.__dictoffset__ != 0 or "__slots__" in vars(kind)


def _inside(holder: Any, path: Path, names: Collection[str]) -> Iterator[tuple[Path, Any]]:
    own = names_in(holder)
    if not own and not _is_python(type(holder)):
        return
    for name in sorted(names):
        of_class = inspect.getattr_static(type(holder), name, MISSING)
        is_there = name in own or (is_setting(of_class) and not isinstance(of_class, types.FunctionType))
        value = getattr(holder, name, MISSING) if is_there else MISSING
        if is_setting(value):
            yield (*path, name), copy.deepcopy(value)
        elif value is not MISSING and len(path) < DEPTH:
            yield (*path, name, "__class__"), type(value)
            yield from _inside(value, (*path, name), names)


def names_in(holder: Any) -> list[str]:
    slots = [name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(holder, "__dict__", ()), *slots]
