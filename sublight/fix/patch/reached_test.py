"""What code reaches in other ways than by a name of its own: it is compared at every call, or ends the proof."""

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from sublight.fix.patch.model import patch

WIDTH = 16
OWN = torch.library.Library("sublight_reached_test", "DEF")
OWN.define("same(Tensor x) -> Tensor")
OWN.impl("same", lambda x: x, "CompositeImplicitAutograd")
SCALE = operator.attrgetter("held.scale")
CALL = operator.methodcaller("plain")


class Norm(nn.Module):
    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    def plain(self) -> float:
        return 1.0


class Config:
    scale = 1.0

    def __init__(self) -> None:
        self.eps = 1e-6


@dataclass
class Record:
    scale: float = 1.0


def _held(name: str, forward: Any, make: Callable[[], Any] = Config) -> Callable[[], Any]:
    kind: Any = type(name, (Norm,), {"forward": forward})
    return lambda: kind(make())


def _by_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    config = self.held
    return self.normed(x) * (getattr(config, "eps") / 1e-6)  # type: ignore[no-any-return]  # noqa: B009


def _there(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.normed(x)
    return y * 2 if self.held is None else y * 1  # type: ignore[no-any-return]


class Middle(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x)


class Lower(Middle):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class LowerMethod(Middle):
    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return super().normed(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x)


def _put(path: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    holder, _, name = path.rpartition(".")
    return lambda norm, monkeypatch: setattr(operator.attrgetter(holder)(norm) if holder else norm, name, value)


def _replace(kind: type, name: str) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * Norm.plain_normed(self, x)  # type: ignore[attr-defined,no-any-return]

    return lambda norm, monkeypatch: monkeypatch.setattr(kind, name, doubled, raising=False)


Norm.plain_normed = Norm.normed  # type: ignore[attr-defined]
Change = Callable[[Any, pytest.MonkeyPatch], None]
CHANGES: dict[str, tuple[Callable[[], Any], Change]] = {
    "asked for by name": (_held("NamedNorm", _by_name), _put("held.eps", 2e-6)),
    "set on a config whose class has it": (
        _held("ClassNorm", lambda self, x: self.normed(x) * self.held.scale),
        _put("held.scale", 2.0),
    ),
    "set on a config's class": (
        _held("ClassNorm", lambda self, x: self.normed(x) * self.held.scale),
        lambda norm, monkeypatch: monkeypatch.setattr(Config, "scale", 2.0),
    ),
    "an object that goes": (_held("ThereNorm", _there), _put("held", None)),
    "super's forward": (Lower, _replace(Middle, "forward")),
    "super's method": (LowerMethod, _replace(Norm, "normed")),
    "a method of a class between": (LowerMethod, _replace(Middle, "normed")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_where_code_reaches_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change = CHANGES[name]
    model, x = nn.Sequential(make()), torch.randn(3, WIDTH)
    assert patch(model).swapped == 1
    before = model(x)
    change(model[0], monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = model(x)
    torch.testing.assert_close(after, 2 * before)


def _matched(self: Any, x: torch.Tensor) -> torch.Tensor:
    match self.held:
        case Record(scale):
            return self.normed(x) * scale  # type: ignore[no-any-return]
    return x


def _learning() -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "attrgetter": (_held("GetNorm", lambda self, x: self.normed(x) * SCALE(self)), "whose names are not written"),
    "attrgetter made there": (
        _held("GetNorm", lambda self, x: self.normed(x) * operator.attrgetter("held.scale")(self)),
        "whose names are not written",
    ),
    "methodcaller": (_held("CallNorm", lambda self, x: self.normed(x) * CALL(self)), "whose names are not written"),
    "pattern": (_held("MatchNorm", _matched, Record), "takes an object apart"),
    "optimizer": (
        _held("LearningNorm", lambda self, x: self.normed(x) * self.held.param_groups[0]["lr"], _learning),
        "reads held.param_groups, which holds more than plain values",
    ),
    "op of its own": (
        _held("OwnNorm", lambda self, x: torch.ops.sublight_reached_test.same(self.normed(x))),
        "calls sublight_reached_test.same",
    ),
    "op that it holds": (
        _held("HeldNorm", lambda self, x: self.held(self.normed(x)), lambda: torch.ops.sublight_reached_test.same),
        "calls sublight_reached_test.same",
    ),
    "factor of a sum": (
        _held("SumNorm", lambda self, x: (y := self.normed(x)).add(y, alpha=x.shape[0] // 4096)),
        "computes with sizes",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_reached_by_a_text_or_kept_elsewhere_is_left(name: str) -> None:
    make, why = LEFT[name]
    (row,) = patch(nn.Sequential(make())).rows
    assert not row.is_swapped and why in row.reason


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down, self.act = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def test_a_function_may_take_an_activations_place() -> None:
    model, x = Gated(), torch.randn(3, WIDTH)
    assert patch(nn.Sequential(model)).swapped == 1
    del model.act
    model.__dict__["act"] = torch.tanh
    with pytest.warns(UserWarning, match="has changed since"):
        assert torch.equal(model(x), type(model).forward(model, x))


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


PLACES: dict[str, Callable[[], Any]] = {
    "a device": lambda: torch.device("meta"),
    "a default device": _default_device,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_may_be_patched_anywhere(place: str) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), Gated(), nn.GELU(), Norm(), nn.LogSoftmax(-1))
    x = torch.randn(3, WIDTH)
    plain = model(x)
    with PLACES[place]():
        assert patch(model).swapped == len(model)
    torch.testing.assert_close(model(x), plain)
