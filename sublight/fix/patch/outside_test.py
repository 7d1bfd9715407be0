"""What a forward's code reads from outside ends the proof, or is compared at every call."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from sublight.fix.patch import outside
from sublight.fix.patch.model import patch
from sublight.fix.patch.trials import count

WIDTH = 16
CALLS: list[int] = []
TABLE = {4096: 0.5}
EPS = 1e-6


class State:
    scale = 1.0


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def by_hand(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _counting(self: Any, x: Any) -> Any:
    CALLS.append(1)
    return self.scaled(x)


def _printing(self: Any, x: Any) -> Any:
    print("called")
    return self.scaled(x)


def _importing(self: Any, x: Any) -> Any:
    import time

    return self.scaled(x) * (1.0 if time.time() else 2.0)


def _looping(self: Any, x: Any) -> Any:
    for each in range(x.shape[-2]):
        x = x * 2 if each > 3000 else x
    return self.scaled(x)


ODD: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "environment": (
        lambda self, x: self.scaled(x) * (2 if os.environ.get("TWICE") else 1),
        "reads a variable from outside (environ)",
    ),
    "counter": (_counting, "reads a variable from outside (CALLS)"),
    "print": (_printing, "calls print"),
    "import": (_importing, "imports time"),
    "loop": (_looping, "has a loop, whose length may be its input's"),
    "table": (lambda self, x: self.scaled(x) * TABLE.get(x.shape[-2], 1.0), "reads a variable from outside (TABLE)"),
    "logarithm": (lambda self, x: self.scaled(x) * (2 if math.log(x.shape[-2]) > 8 else 1), "calls log"),
    "class": (lambda self, x: self.scaled(x) * State.scale, "reads State.scale"),
    "threads": (
        lambda self, x: self.scaled(x) * (2 if torch.get_num_threads() > 64 else 1),
        "asks for a setting of PyTorch (get_num_threads)",
    ),
    "compiling": (
        lambda self, x: self.scaled(x) * (2 if torch.compiler.is_compiling() else 1),
        "asks for a setting of PyTorch (is_compiling)",
    ),
    "autocast": (
        lambda self, x: self.scaled(x) * (2 if torch.is_autocast_enabled("cpu") else 1),
        "asks for a setting of PyTorch (is_autocast_enabled)",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_a_forward_that_reads_more_is_left_and_never_called(name: str) -> None:
    forward, why = ODD[name]
    kind: Any = type(f"{name.title()}Norm", (Norm,), {"forward": forward})
    found = patch(nn.Sequential(kind()))
    assert [row.reason for row in found.rows] == [f"not tried: its forward {why}"] and not CALLS


TRACED: dict[str, Callable[[Any], Any]] = {
    "ndim": lambda x: x.ndim == 4,
    "dim": lambda x: x.dim() == 4,
    "len": lambda x: len(x.shape) == 4,
    "division": lambda x: x.shape[-2] / 2048 > 1,
    "int": lambda x: int(x.shape[-2]) > 2048,
    "root": lambda x: math.sqrt(x.shape[-2]) > 64,
    "text": lambda x: f"{x.shape[-2]}" == "4096",
    "hash": lambda x: x.shape[-2] in {4096, 8192},
    "bytes": lambda x: x.nbytes > 1 << 40,
    "version": lambda x: x._version > 5,
}


@pytest.mark.parametrize("name", TRACED)
def test_a_branch_on_the_input_is_no_norm(name: str) -> None:
    other = TRACED[name]

    class BranchNorm(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight if other(x) else self.scaled(x)

    (row,) = patch(nn.Sequential(BranchNorm())).rows
    assert not row.is_swapped and row.reason.startswith("structure not proven: its forward")


class ClassNorm(Norm):
    eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class MethodNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)


class OtherMethod(MethodNorm):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x


class HeldNorm(Norm):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.held
        eps = held["eps"] if isinstance(held, dict) else held.text.eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight


class AskedNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + getattr(self, "eps", 1e-6)) * self.weight


class GlobalNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight


class FunctionNorm(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_hand(x) * self.weight


class Slotted:
    __slots__ = ("text",)


def _slotted() -> Slotted:
    made = Slotted()
    made.text = types.SimpleNamespace(eps=1e-6)  # type: ignore[attr-defined]
    return made


HERE = globals()
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], None], str]] = {
    "hidden class attribute": (ClassNorm, lambda m, patch: setattr(m, "eps", 1.0), "eps"),
    "class attribute": (ClassNorm, lambda m, patch: patch.setattr(ClassNorm, "eps", 1.0), "eps"),
    "hidden method": (MethodNorm, lambda m, patch: setattr(m, "scaled", lambda x: 3 * x), "scaled"),
    "class with another method": (MethodNorm, lambda m, patch: setattr(m, "__class__", OtherMethod), "scaled"),
    "dictionary": (lambda: HeldNorm({"eps": 1e-6}), lambda m, patch: m.held.update(eps=1.0), "held"),
    "slots, object in object": (
        lambda: HeldNorm(_slotted()),
        lambda m, patch: setattr(m.held.text, "eps", 1.0),
        "held.text.eps",
    ),
    "asked for by name": (AskedNorm, lambda m, patch: setattr(m, "eps", 1.0), "eps"),
    "global": (GlobalNorm, lambda m, patch: patch.setitem(HERE, "EPS", 1.0), "the global EPS"),
    "function": (FunctionNorm, lambda m, patch: patch.setitem(HERE, "by_hand", lambda x: 3 * x), "the global by_hand"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_behind_a_forward_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change, what = CHANGES[name]
    model = nn.Sequential(make())
    x = torch.linspace(-2, 2, 4 * WIDTH).view(4, WIDTH)
    patch(model)
    assert count(model) == 1
    before = model(x)
    change(model[0], monkeypatch)
    with pytest.warns(UserWarning, match=f"has changed since sublight.patch \\({what}\\)"):
        after = model(x)
    own: Any = type(model[0])
    assert torch.equal(after, own.forward(model[0], x)) and not torch.allclose(after, before)


def test_pytorchs_own_modules_are_not_read() -> None:
    assert outside.of_module(nn.LayerNorm(4)) == outside.Outside()


class Pair(NamedTuple):
    x: Any
    y: Any = None


@dataclass
class Result:
    x: Any = None
    more: list[Any] = field(default_factory=list)


@dataclass
class Counted(Result):
    def __post_init__(self) -> None:
        CALLS.append(1)


@dataclass
class Made(Result):
    y: Any = field(default_factory=lambda: CALLS.append(1))


class Scaled(Result):
    def __init__(self, x: Any) -> None:
        super().__init__(2 * x)


@pytest.mark.parametrize(
    ("kind", "is_record"), [(Pair, True), (Result, True), (Counted, False), (Made, False), (Scaled, False)]
)
def test_a_record_without_code_of_its_authors_may_be_made(kind: type, is_record: bool) -> None:
    assert outside._is_record(kind) == is_record
