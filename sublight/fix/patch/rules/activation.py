"""Activation modules: gelu by the error function or by tanh, relu², whatever their formula is written as."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sublight.fix.patch import probe
from sublight.fix.patch.proof import Formula, Proof, prove, quiet, scaled
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.trace import trace
from sublight.fix.patch.twin import NotCopied, answer, first, is_cast, is_leaf, own, random, twin_of
from sublight.ops.pointwise.activation import gelu, gelu_reference, gelu_tanh, relu2, relu2_reference

OPS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}
Elementwise = Callable[[torch.Tensor], torch.Tensor]
ENDS = (4.0, 100.0)  # where the two gelus differ, and where one that is clipped does
UNCAST = (
    "gelu",
    "gelu_tanh",
    "relu",
    "square",
    "mul",
    "add",
    "tanh",
    "clone",
)  # autocast makes float32 of pow, not of these
ROWS, COLS = 16, 32


def gelu_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_tanh_by_hand(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


FORMULAS: dict[str, Elementwise] = {
    "gelu": gelu_reference,
    "gelu_tanh": partial(gelu_reference, approximate="tanh"),
    "relu2": relu2_reference,
    "silu": F.silu,
}
BY_HAND: dict[str, Elementwise] = {
    "gelu": gelu_by_hand,
    "gelu_tanh": gelu_tanh_by_hand,
    "relu2": lambda x: F.relu(x) * F.relu(x),
    "silu": lambda x: x * torch.sigmoid(x),
}
BUDGETS: dict[str, dict[str, int]] = {  # what each may be written with
    "gelu": {"gelu": 1, "erf": 1, "mul": 3, "div": 1, "add": 1},
    "gelu_tanh": {"gelu_tanh": 1, "tanh": 1, "pow": 1, "mul": 7, "add": 2},
    "relu2": {"relu": 1, "pow": 1, "mul": 1},
    "silu": {"silu": 1, "sigmoid": 1, "mul": 1},
}


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    if not is_leaf(module):
        return None
    try:
        twin = twin_of(module)
    except NotCopied:
        return None
    x = torch.stack([torch.linspace(-end, end, 64, dtype=torch.float64) for end in ENDS])
    result, _ = answer(twin, x)
    if not isinstance(result, torch.Tensor) or result.shape != x.shape:
        return None
    kind = next((kind for kind in OPS if all(map(probe.same, result, FORMULAS[kind](x)))), None)
    if kind is None:
        return None
    formula = Formula(
        name=kind,
        budget=BUDGETS[kind],
        compute=lambda twin, x: FORMULAS[kind](x),
        by_hand=lambda twin, x: BY_HAND[kind](x),
        any_width=True,
    )
    proof = prove(twin, formula, scaled(random(ROWS, COLS)), probe.dtype_of(module, model))
    if proof.missing:
        return Left(rule="activation", reason=proof.missing)
    with torch.no_grad(), quiet():
        calls = trace(type(twin).forward, twin, x.clone()).ops
    return _swap(kind, set(calls) <= set(UNCAST), proof)


def _swap(kind: str, stays_under_autocast: bool, proof: Proof) -> Swap:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not proof.holds_for(args[0]) or (is_cast(args[0]) and not stays_under_autocast):
            return own(self, *args, **kwargs)
        return OPS[kind](*args)

    def arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (first(args, kwargs),)

    return Swap(rule="activation", op=kind, forward=forward, arguments=arguments, what=kind)


ACTIVATION = Rule(name="activation", find=find)
