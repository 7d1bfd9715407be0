"""Activation modules: gelu by the error function or by tanh, relu², whatever their formula is written as."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from sublight.fix.patch import probe
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.twin import answer, first, is_cast, is_leaf, keeps_16_bit, own, twin_of
from sublight.ops.pointwise.activation import gelu, gelu_reference, gelu_tanh, relu2, relu2_reference

OPS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}
FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu_reference,
    "gelu_tanh": partial(gelu_reference, approximate="tanh"),
    "relu2": relu2_reference,
}
ENDS = (4.0, 100.0)  # where the two gelus differ, and where one that is clipped does
UNCAST = ("gelu", "relu", "square", "mul", "add", "tanh", "clone")  # autocast makes float32 of pow, not of these


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    if not is_leaf(module):
        return None
    twin = twin_of(module)
    x = torch.stack([torch.linspace(-end, end, 64, dtype=torch.float64) for end in ENDS])
    result, _ = answer(twin, x)
    if not isinstance(result, torch.Tensor) or result.shape != x.shape:
        return None
    kind = next((kind for kind, formula in FORMULAS.items() if all(map(probe.same, result, formula(x)))), None)
    if kind is None:
        return None
    if not keeps_16_bit(twin, x):
        return Left(rule="activation", reason="it gives another data type than it takes")
    with torch.no_grad(), _Calls() as calls:
        type(twin).forward(twin, x.clone())
    return _swap(kind, set(calls.names) <= set(UNCAST))


class _Calls(TorchFunctionMode):
    """The names of the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append((resolve_name(func) or "?").rsplit(".", 1)[-1].strip("_"))
        return func(*args, **(kwargs or {}))


def _swap(kind: str, stays_under_autocast: bool) -> Swap:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or (is_cast(args[0]) and not stays_under_autocast):
            return own(self, *args, **kwargs)
        return OPS[kind](*args)

    def arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (first(args, kwargs),)

    return Swap(rule="activation", op=kind, forward=forward, arguments=arguments, what=kind)


ACTIVATION = Rule(name="activation", find=find)
