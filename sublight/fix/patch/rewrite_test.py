"""A rebuilt forward is the old one but for what was changed."""

from __future__ import annotations

import ast
import functools
import inspect
import traceback
from typing import Any

import pytest

from sublight.fix.patch import rewrite

OFFSET = 1


class Base:
    def forward(self, x: int) -> int:
        return x


def logged(function: Any) -> Any:
    """A decorator with an effect of its own."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return function(self, *args, **kwargs)

    return wrapper


def opaque(function: Any) -> Any:
    """A decorator that reaches what it wraps in a way that nobody can see."""
    held = [function]

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return held[0](*args)

    return wrapper


def double(x: int) -> int:
    return 2 * x


class Decorated(Base):
    calls = 0

    @logged
    @logged
    def forward(self, x: int, *, more: int = 3) -> Any:
        text = """kept
            as it is"""
        if x < 0:
            raise ValueError(text)
        return double(super().forward(x)) + more + OFFSET


class Private:
    def forward(self, x: int) -> Any:
        return double(x) + self.__hidden  # type: ignore[attr-defined]


class Opaque:
    @opaque
    def forward(self, x: int) -> int:
        return double(x)


def tripled(function: Any) -> Any:
    """The function with `double` replaced by what triples."""

    def change(tree: ast.FunctionDef) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "double":
                node.id = "__triple"

    return rewrite.rebuilt(function, change, {"__triple": lambda x: 3 * x})


def test_only_the_change_is_seen_and_decorators_defaults_super_and_live_globals_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, module = tripled(Decorated.forward), Decorated()
    assert made(module, 5) == 3 * 5 + 3 + 1 and module.calls == 2
    assert made(module, 5, more=0) == 16
    monkeypatch.setattr(f"{__name__}.OFFSET", 10)
    assert made(module, 5) == 28
    assert Decorated().forward(5) == 23
    assert inspect.signature(made) == inspect.signature(Decorated.forward)


def test_a_traceback_shows_the_lines_of_the_source_and_strings_stay() -> None:
    with pytest.raises(ValueError, match="kept\n            as it is") as raised:
        tripled(Decorated.forward)(Decorated(), -1)
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert last.filename == __file__ and last.line == "raise ValueError(text)" and last.name == "forward"


def closed_over(by: int) -> Any:
    def forward(self: Any, x: int) -> int:
        return double(x) + by

    return forward


def test_closures_are_kept() -> None:
    assert tripled(closed_over(by=7))(None, 2) == 13


def test_what_cannot_be_rebuilt_says_why() -> None:
    made: dict[str, Any] = {}
    exec("def forward(self, x):\n    return double(x)", made)
    stale = closed_over(1)
    stale.__code__ = stale.__code__.replace(co_names=("treble",))
    for function, reason in (
        (Private.forward, "private names"),
        (Opaque.forward, "does not show what it calls"),
        (made["forward"], "not to be had"),
        (stale, "not what runs"),
        (functools.partial(double), "a partial, not a function"),
        (lambda self, x: double(x), "not a plain function|not to be had"),
    ):
        with pytest.raises(rewrite.NotUnderstood, match=reason):
            tripled(function)


def test_a_signature_is_taken_over() -> None:
    seen = {}

    def ours(self: Any, **given: Any) -> None:
        seen.update(given)

    def own(self: Any, input_ids: Any = None, mask: Any = None, *, keep: int = 0, **kwargs: Any) -> None:
        """Not called."""

    made = rewrite.signed(ours, own)
    assert str(inspect.signature(made)) == str(inspect.signature(own))
    made(None, 1, keep=2, other=3)
    assert seen == {"input_ids": 1, "mask": None, "keep": 2, "other": 3}
    with pytest.raises(rewrite.NotUnderstood, match="unnamed"):
        rewrite.signed(ours, lambda self, *args: None)
