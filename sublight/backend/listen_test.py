"""Launches are intercepted in one place, in order, and Triton is as it was afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from sublight.backend.jit import tl
from sublight.backend.listen import LISTENERS, Proceed, Request, listening


@JITFunction
def _kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches Triton."""
    made: list[tuple[Any, ...]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> str:
        made.append((self, args, grid, warmup, kwargs))
        return "compiled"

    monkeypatch.setattr(JITFunction, "run", run)
    return made


def test_a_listener_may_let_a_launch_go_on_change_it_or_keep_it(made: list[Any]) -> None:
    heard: list[Request] = []

    def lets_go(request: Request, proceed: Proceed) -> Any:
        heard.append(request)
        return proceed(request)

    with listening(lets_go):
        assert _kernel[(2,)]("x", BLOCK=4) == "compiled"
    with listening(lambda request, proceed: proceed(replace(request, warmup=True))):
        _kernel[(2,)]("x", BLOCK=4)
    with listening(lambda request, proceed: "kept"):
        assert _kernel[(2,)]("x", BLOCK=4) == "kept"
    assert made == [(_kernel, ("x",), (2,), warmup, {"BLOCK": 4}) for warmup in (False, True)]
    assert heard == [Request(kernel=_kernel, args=("x",), kwargs={"BLOCK": 4}, grid=(2,), warmup=False)]


def test_the_innermost_hears_first(made: list[Any]) -> None:
    order: list[str] = []

    def named(name: str) -> Any:
        def listener(request: Request, proceed: Proceed) -> Any:
            order.append(name)
            return proceed(request)

        return listener

    with listening(named("outer")), listening(named("inner")):
        _kernel[(1,)]("x", BLOCK=4)
    assert order == ["inner", "outer"] and len(made) == 1


def test_afterwards_triton_is_as_it_was_even_after_an_error(made: list[Any]) -> None:
    before = JITFunction.run
    with pytest.raises(KeyError), listening(lambda request, proceed: {}["missing"]):
        assert JITFunction.run is not before
        _kernel[(1,)]("x", BLOCK=4)
    assert JITFunction.run is before and LISTENERS == [] and made == []
