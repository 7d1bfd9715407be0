"""What a call reads from outside its arguments, and whether it is still as it was when the graph was captured.

A graph holds addresses and the numbers that Python had: a parameter that was moved, a learning rate that was changed,
a counter that Python should have counted would make it silently wrong. So what a function can reach (its closure, the
globals it names, modules, optimizers, the objects in its arguments) is walked once, and looked at before each replay.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

MOST = 20_000  # things that are looked at when a function is walked
DEEPEST = 6
LONG = 64  # a container of more numbers than this is data, which nobody looks through before each replay
_NUMBERS = (bool, int, float, str, type(None))
_SKIPPED = (type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.Generator)


@dataclass(frozen=True, slots=True)
class Slot:
    """A place that holds a tensor, a module or a number, and how a reason calls it."""

    owner: Any
    key: Any
    label: str


class Cell:
    """A variable of an enclosing function, as a place with one key."""

    __slots__ = ("cell",)

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self.cell.cell_contents


class Attributes:
    """What an object has in slots or from its class, as places."""

    __slots__ = ("holder",)

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.holder, name)
        except AttributeError as error:
            raise KeyError(name) from error


@dataclass(slots=True, kw_only=True)
class Outside:
    """Everything a function was found to reach."""

    tensors: list[Slot] = field(default_factory=list)
    modules: list[Slot] = field(default_factory=list)
    numbers: list[Slot] = field(default_factory=list)  # looked at before each replay
    counters: list[Slot] = field(default_factory=list)  # looked at while warming up: too many for each replay
    parameters: list[torch.Tensor] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def snapshot(self) -> list[Any]:
        return [_held(slot) for slot in (*self.numbers, *self.counters)]

    def kept(self) -> list[torch.Tensor]:
        """What a call may leave where Python assigns it: a replay does the same."""
        tensors = [x for each in self.optimizers for x in vars(each).values() if isinstance(x, torch.Tensor)]
        return [*tensors, *(p.grad for p in self.parameters if p.grad is not None)]

    def bound(self) -> list[Any]:
        """Which tensor each place has."""
        return [_held(slot) for slot in self.tensors]

    def rebound(self, before: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Places to which a call has bound other tensors."""
        for slot, was in zip(self.tensors, before, strict=True):
            if (now := _held(slot)) is not was and isinstance(now, torch.Tensor):
                yield slot.label, now

    def counted(self, before: list[Any]) -> str | None:
        """The number that a call has changed."""
        slots = (*self.numbers, *self.counters)
        return next((s.label for s, was in zip(slots, before, strict=False) if not _same(_held(s), was)), None)


class Guard:
    """What the outside was when a graph was captured."""

    def __init__(self, outside: Outside, device_type: str, *, ran_backward: bool = False) -> None:
        self._trained = [(p, p.requires_grad) for p in outside.parameters] if ran_backward else []
        self._tensors = [
            (s.owner, s.key, x, x.data_ptr(), s.label) for s in outside.tensors if (x := _held(s)) is not None
        ]
        self._on_host = [(x, x._version, name) for *_, x, _, name in self._tensors if x.device.type != device_type]
        self._modules = [(s.owner, s.key, _held(s), s.label) for s in outside.modules]
        self._numbers = [(s.owner, s.key, _held(s), s.label) for s in outside.numbers]
        places = [*self._tensors, *self._modules]
        self._owners, self._keys, self._objects = ([place[at] for place in places] for at in range(3))
        self._pointers = [pointer for *_, pointer, _ in self._tensors]
        self._held_tensors = [x for _, _, x, _, _ in self._tensors]
        self._holders, self._names, self._values = ([place[at] for place in self._numbers] for at in range(3))

    def moved(self) -> str | None:
        """A tensor or module that is another now, or elsewhere: the graph is of no use any more."""
        # a model has hundreds of places, and a replay waits for this: all at once in C, one by one only for a name
        with contextlib.suppress(KeyError, IndexError, ValueError):
            is_same = all(map(operator.is_, map(operator.getitem, self._owners, self._keys), self._objects))
            if is_same and list(map(torch.Tensor.data_ptr, self._held_tensors)) == self._pointers:
                return None
        try:
            for owner, key, x, pointer, label in self._tensors:
                if owner[key] is not x or x.data_ptr() != pointer:
                    return label
            for owner, key, module, label in self._modules:
                if owner[key] is not module:
                    return label
        except (KeyError, IndexError, ValueError):  # ValueError: an empty cell
            return label
        return None

    def changed(self) -> str | None:
        """A number that is another now, in Python or in a CPU tensor: the graph may be of use again."""
        for p, is_trained in self._trained:
            if p.requires_grad != is_trained:
                return "requires_grad of a parameter"
        for x, version, label in self._on_host:
            if x._version != version:
                return label
        with contextlib.suppress(KeyError, IndexError, ValueError):  # as in moved()
            if all(map(operator.is_, map(operator.getitem, self._holders, self._names), self._values)):
                return None
        try:
            for owner, key, value, label in self._numbers:
                now = owner[key]
                if now is not value and not _same(now, value):
                    return label
        except (KeyError, IndexError, ValueError):
            return label
        return None

    @property
    def held(self) -> list[torch.Tensor]:
        return self._held_tensors


class Effects:
    """What a call leaves in places that Python assigns: gradients, and what an optimizer tells of its last step.

    A replay assigns nothing, so this does. It also knows which gradients must be there before: a call may add to them.
    """

    def __init__(self, outside: Outside, *, ran_backward: bool) -> None:
        self._grads = [(p, p.grad) for p in outside.parameters] if ran_backward else []
        self._attributes = [(vars(each), dict(vars(each))) for each in outside.optimizers]
        self._needed: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._left: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._new_attributes: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def end(self) -> None:
        """After the capture: a gradient that was replaced need not be there again, all others must be as they were."""
        self._needed = [(p, grad) for p, grad in self._grads if grad is None or p.grad is grad]
        self._left = [(p, p.grad) for p, grad in self._grads if p.grad is not grad]
        for now, before in self._attributes:
            new = [(key, x) for key, x in now.items() if isinstance(x, torch.Tensor) and x is not before.get(key)]
            self._new_attributes += [(now, key, x) for key, x in new]

    def undo(self) -> None:
        for p, grad in self._grads:
            p.grad = grad

    def missing(self) -> bool:
        return any(p.grad is not grad for p, grad in self._needed)

    def put(self) -> None:
        """What the call's Python would have done."""
        for p, grad in self._left:
            if p.grad is not grad:
                p.grad = grad
        for place, key, x in self._new_attributes:
            place[key] = x.clone()

    @property
    def held(self) -> list[torch.Tensor]:
        grads = [grad for _, grad in (*self._needed, *self._left) if grad is not None]
        return grads + [x for _, _, x in self._new_attributes]


def _held(slot: Slot) -> Any:
    try:
        return slot.owner[slot.key]
    except (KeyError, IndexError, ValueError):
        return None


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one != one)


def reach(fn: Any, objects: Iterable[Any] = ()) -> Outside:
    """Walk what a function, and the objects among its arguments, can read."""
    walk = _Walk()
    walk.given = {id(each) for each in objects}
    return walk.run([("", fn), *[(type(each).__name__, each) for each in objects]])


class _Walk:
    def __init__(self) -> None:
        self.outside = Outside()
        self.seen: set[int] = set()
        self.keep: list[Any] = []  # so that no address is met twice
        self.parameters: dict[int, torch.Tensor] = {}
        self.names: set[str] = set()  # that the code walked so far speaks of: other numbers of an object do not matter
        self.given: set[int] = set()  # objects among the arguments, and what they hold: there, all numbers do

    def run(self, roots: list[tuple[str, Any]]) -> Outside:
        queue = [(label, value, 0) for label, value in roots]
        while queue and len(self.seen) < MOST:
            label, value, depth = queue.pop(0)
            if id(value) in self.seen or depth > DEEPEST:
                continue
            self.seen.add(id(value))
            self.keep.append(value)
            for name, owner, key, child in self._children(label, value):
                if isinstance(child, torch.Tensor):
                    self.outside.tensors.append(Slot(owner, key, name))
                    self._parameter(child)
                elif isinstance(child, _NUMBERS):
                    self.outside.numbers.append(Slot(owner, key, name))
                elif not isinstance(child, _SKIPPED):
                    queue.append((name, child, depth + 1))
                    if id(value) in self.given:
                        self.given.add(id(child))
        self.outside.parameters = list(self.parameters.values())
        return self.outside

    def _parameter(self, x: torch.Tensor) -> None:
        if x.requires_grad and x.is_leaf:
            self.parameters.setdefault(id(x), x)

    def _children(self, label: str, value: Any) -> Iterator[tuple[str, Any, Any, Any]]:
        if isinstance(value, torch.nn.Module):
            self._module(label, value)
        elif isinstance(value, torch.optim.Optimizer):
            yield from self._optimizer(label, value)
        elif isinstance(value, functools.partial):
            yield from _items(label, {"func": value.func, "args": value.args, "keywords": value.keywords})
        elif isinstance(value, types.MethodType):
            self.names |= _names_of_methods(type(value.__self__), value.__func__)
            yield from _items("", {"self": value.__self__, "function": value.__func__})
        elif isinstance(value, types.FunctionType):
            self.names |= set(_names(value.__code__))
            yield from _function(label, value)
        elif isinstance(value, dict | list | tuple):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in pairs:
                if len(value) <= LONG or not isinstance(item, _NUMBERS):
                    yield (f"{label}[{key!r}]" if label else str(key)), value, key, item
        elif not isinstance(value, torch.Tensor) and not _is_library(type(value)):
            own = _items(label, getattr(value, "__dict__", {}), dot=True)
            for name, owner, key, item in (*own, *_of_class(label, value)):
                if not isinstance(item, _NUMBERS) or key in self.names or id(value) in self.given:
                    yield name, owner, key, item

    def _module(self, label: str, root: torch.nn.Module) -> None:
        named = self.names | _names_of_methods(type(root), getattr(type(root), "forward", None))
        for path, module in root.named_modules():
            name = ".".join(part for part in (label, path) if part) or type(root).__name__
            self.seen.add(id(module))
            for kind in ("_parameters", "_buffers"):
                places = module.__dict__[kind]
                for key, x in places.items():
                    if x is not None:
                        self.outside.tensors.append(Slot(places, key, f"{name}.{key}"))
                        self._parameter(x)
            for key in module._modules:
                self.outside.modules.append(Slot(module._modules, key, f"{name}.{key}"))
            self.outside.numbers.append(Slot(module.__dict__, "training", f"{name}.training"))
            for key, x in module.__dict__.items():
                if isinstance(x, torch.Tensor):
                    self.outside.tensors.append(Slot(module.__dict__, key, f"{name}.{key}"))
                elif isinstance(x, _NUMBERS) and key != "training":
                    where = self.outside.numbers if module is root and key in named else self.outside.counters
                    where.append(Slot(module.__dict__, key, f"{name}.{key}"))

    def _optimizer(self, label: str, value: torch.optim.Optimizer) -> Iterator[tuple[str, Any, Any, Any]]:
        self.outside.optimizers.append(value)
        for number, group in enumerate(value.param_groups):
            for key, item in group.items():
                if key == "params":
                    for i, p in enumerate(item):
                        self.outside.tensors.append(Slot(item, i, f"{label}.param_groups[{number}]['params'][{i}]"))
                        self._parameter(p)
                else:
                    yield f"{label}.param_groups[{number}]['{key}']", group, key, item
        for state in value.state.values():
            if isinstance(state, dict):
                yield from _items(f"{label}.state", state)


def _items(label: str, values: dict[Any, Any], *, dot: bool = False) -> Iterator[tuple[str, Any, Any, Any]]:
    for key, item in values.items():
        name = f"{label}.{key}" if dot else f"{label}[{key!r}]" if label else str(key)
        yield name, values, key, item


def _of_class(label: str, value: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """What an object has in slots, and the numbers that it has of its class until it gets its own."""
    for name in {name: None for kind in type(value).__mro__ if not _is_library(kind) for name in vars(kind)}:
        of_class = inspect.getattr_static(type(value), name)
        is_slot = isinstance(of_class, types.MemberDescriptorType) and hasattr(value, name)
        is_number = isinstance(of_class, _NUMBERS) and not name.startswith("__")
        if (is_slot or is_number) and name not in getattr(value, "__dict__", ()):
            yield f"{label}.{name}", Attributes(value), name, getattr(value, name)


def _function(label: str, fn: types.FunctionType) -> Iterator[tuple[str, Any, Any, Any]]:
    """The variables of enclosing functions, and the globals that its code names; not what libraries have."""
    if _is_library(fn):
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, Cell(cell), 0, cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for name in _names(fn.__code__):
        if name in fn.__globals__ and "site-packages" not in fn.__code__.co_filename:
            yield name, fn.__globals__, name, fn.__globals__[name]
    if fn.__defaults__:
        yield from _items(label, {"defaults": fn.__defaults__})
    if fn.__kwdefaults__:
        yield from _items(label, fn.__kwdefaults__)
    if (inner := getattr(fn, "__wrapped__", None)) is not None:
        yield "__wrapped__", fn.__dict__, "__wrapped__", inner


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _names_of_methods(kind: type, first: Any) -> set[str]:
    """The names in a method's code, and in the methods of its class that it calls."""
    names: set[str] = set()
    queue = [first]
    while queue:
        code = getattr(queue.pop(), "__code__", None)
        for name in set(_names(code)) - names if code is not None else ():
            names.add(name)
            queue.append(getattr(kind, name, None))
    return names


def _is_library(thing: Any) -> bool:
    """PyTorch's and Python's own objects: too many, and none that a call changes; caches of models are no such."""
    module = getattr(thing, "__module__", None) or ""
    return module.split(".")[0] in ("torch", "builtins", "threading", "weakref", "logging", "contextvars")
