"""A module's twin, to be tried out: its class and its attributes, but random float64 parameters on the CPU, no hooks,
and stand-ins for children that are too large to copy. What a twin does, the module does, whatever its class is called.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from sublight.backend.private import has_any_global_hook
from sublight.fix.patch import held, outside, probe
from sublight.fix.patch.trace import as_one_op

TORCH_FOLDER = str(torch.__path__[0])
RANK = 4  # of a stand-in's matrix


class Line(torch.nn.Module):
    """Stands in for a projection: affine, of its widths, of low rank, so that a large one costs nothing."""

    def __init__(self, width: int, out: int, seed: int, name: str = "") -> None:
        super().__init__()
        self.name = name
        first, second = random(width, RANK, seed=seed), random(RANK, out, seed=seed + 1)
        self.register_buffer("first", first / width**0.5)
        self.register_buffer("second", second / RANK**0.5)
        self.register_buffer("shift", random(out, seed=seed + 2) / 2)
        self.register_buffer("weight", random(0))  # for whoever asks for its data type

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with as_one_op(self.name):
            return x @ self.first @ self.second + self.shift  # type: ignore[operator]


class Shift(torch.nn.Module):
    """Stands in for dropout: it shows where it is called, and the same every time."""

    def __init__(self, by: float, name: str = "") -> None:
        super().__init__()
        self.by, self.name = by, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with as_one_op(self.name):
            return x + self.by


def random(*shape: int, seed: int = probe.SEED) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def twin_of(
    module: torch.nn.Module,
    stand_ins: Mapping[str, torch.nn.Module] | None = None,
    parameters: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """The module is not changed: lists, counts and objects that it holds are the twin's own. Raises NotCopied."""
    if oddity := outside.of_module(module).oddity:
        raise NotCopied(f"its forward {oddity}")
    twin = object.__new__(type(module))
    vars(twin).update({name: own_copy(value) for name, value in vars(module).items()})
    given = parameters or {}
    mine = {
        name: given.get(name) if name in given or p is None else random(*p.shape, seed=probe.SEED + i) * 0.3 + 0.2
        for i, (name, p) in enumerate(module._parameters.items())
    }
    children = {
        name: child if child is None else (stand_ins or {}).get(name) or twin_of(child)
        for name, child in module._modules.items()
    }
    vars(twin).update(_parameters=mine, _modules=children, _compiled_call_impl=None)
    vars(twin)["_buffers"] = {name: b if b is None else _plain(b) for name, b in module._buffers.items()}
    vars(twin).update({name: OrderedDict() for name in probe.HOOKS})
    return twin


def shallow(twin: Any) -> Any:
    """Another module with the same contents; not by `copy`, for which a class may have ways of its own."""
    other = object.__new__(type(twin))
    vars(other).update(vars(twin))
    return other


class NotCopied(Exception):
    """Why a module is not tried out."""


def own_copy(value: Any, depth: int = 3) -> Any:
    """A copy that a forward may change: containers and objects, not the tensors, modules and functions in them."""
    if isinstance(value, torch.nn.Module | type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType):
        return value
    if isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device | torch.Tensor | None):
        return value
    try:
        if held.is_setting(value):
            return copy.deepcopy(value)
        copied = copy.copy(value)
        if not depth:
            return copied
        if isinstance(copied, dict):
            for key, item in list(copied.items()):
                copied[key] = own_copy(item, depth - 1)
        elif type(copied) in (list, tuple, set, frozenset):
            copied = type(copied)(own_copy(item, depth - 1) for item in copied)
        elif copied is not value:
            for name in held.names_in(copied):
                if hasattr(copied, name):
                    object.__setattr__(copied, name, own_copy(getattr(copied, name), depth - 1))
    except NotCopied:
        raise
    except Exception as error:  # whatever a stranger's object may raise
        raise NotCopied(f"it holds a {type(value).__name__}, which cannot be copied") from error
    return copied


def _plain(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.is_meta:
        buffer = torch.zeros(buffer.shape, dtype=buffer.dtype)
    buffer = buffer.detach().cpu()
    return buffer.double() if buffer.is_floating_point() else buffer.clone()


def set_training(twin: Any, training: bool) -> None:
    """As `train` does, but not by it: a class may have its own, which tells others."""
    for each in torch.nn.Module.modules(twin):
        each.training = training


def answer(twin: Any, x: torch.Tensor) -> tuple[Any, str]:
    """What its class's forward makes of x; or why that says nothing."""
    answers = []
    for training in (False, True):
        set_training(twin, training)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user gets them when he calls it
                answers.append(type(twin).forward(twin, x.clone()))
        except Exception as error:  # whatever a stranger's forward may raise
            return None, f"its forward does not take one tensor ({type(error).__name__})"
    if not probe.same(*answers):
        return None, "it gives something else in training"
    return answers[0], ""


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether somebody listens to its calls, so that none may be left out."""
    return any(vars(module).get(name) for name in probe.HOOKS)


def is_heard(model: torch.nn.Module) -> bool:
    """Whether somebody listens to a call of any part of it."""
    return has_any_global_hook() or any(map(is_hooked, model.modules()))


def is_pytorchs(kind: type, *functions: Any) -> bool:
    """Whether a module class of PyTorch, and functions of torch.nn.functional, still have PyTorch's own code."""
    codes = [getattr(each, "__code__", None) for each in (getattr(kind, "forward", None), *functions)]
    return all(code is None or code.co_filename.startswith(TORCH_FOLDER) for code in codes)


def is_leaf(module: torch.nn.Module) -> bool:
    """Without children, parameters or buffers: it is its formula."""
    return not (module._modules or module._parameters or module._buffers)


def own(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, for calls that ours does not understand."""
    return type(module).forward(module, *args, **kwargs)


def first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that a module of one argument was called with."""
    return args[0] if args else next(iter(kwargs.values()))


def is_cast(x: torch.Tensor) -> bool:
    """Whether autocast may make another data type of x: what is float32 already, no op but a product touches."""
    return x.dtype != torch.float32 and is_autocast(x)


def is_autocast(x: torch.Tensor) -> bool:
    """Whether autocast is on where x is; PyTorch raises for meta tensors, of which nothing is computed."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)
