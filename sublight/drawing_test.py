"""Which cases of a test run on a GPU: conftest.py draws them from the commit."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from sublight import conftest

OPS, DTYPES = [f"op {n}" for n in range(20)], ["float32", "float16", "bfloat16"]


class Item:
    """As much of a test as a draw looks at."""

    def __init__(self, test: str, seconds: float | None = None, **parameters: Any) -> None:
        self.nodeid = f"a_test.py::{test}[{'-'.join(map(str, parameters.values()))}]" if parameters else test
        self.path, self.seconds = "a_test.py", seconds
        self.callspec = SimpleNamespace(params=parameters)

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(args=(self.seconds,)) if name == "gpu_seconds" and self.seconds else None


def cases(test: str, seconds: float | None = None) -> list[Any]:
    return [Item(test, seconds, op=op, dtype=dtype) for op, dtype in itertools.product(OPS, DTYPES)]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "HAS_GPU", True)
    monkeypatch.setenv("SUBLIGHT_CASES", "drawn")
    monkeypatch.setenv("SUBLIGHT_DRAW", "abc")


def drawn(items: list[Any]) -> list[Any]:
    out = conftest.left_out(items)
    return [item for item in items if item not in out]


@pytest.mark.parametrize("seconds", [None, 4.0])
def test_each_value_of_each_parameter_is_drawn(seconds: float | None) -> None:
    found = drawn(cases("test_many", seconds))
    assert {item.callspec.params["op"] for item in found} == set(OPS)
    assert {item.callspec.params["dtype"] for item in found} == set(DTYPES)
    assert len(OPS) <= len(found) < len(OPS) * len(DTYPES)


def test_of_a_dear_test_fewer_are_drawn() -> None:
    assert len(drawn(cases("test_many", 10.0))) < len(drawn(cases("test_many")))


def test_a_test_with_few_cases_is_whole() -> None:
    few = cases("test_few")[:30]
    assert drawn([*few, Item("a_test.py::test_plain")])[:30] == few and len(drawn([Item("test_plain")])) == 1


def test_another_commit_draws_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first = drawn(items := cases("test_many"))
    assert drawn(items) == first
    monkeypatch.setenv("SUBLIGHT_DRAW", "def")
    assert drawn(items) != first


def test_the_rest_is_what_was_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    first = drawn(items := cases("test_many"))
    monkeypatch.setenv("SUBLIGHT_CASES", "rest")
    assert [item for item in items if item not in first] == drawn(items)
    monkeypatch.setenv("SUBLIGHT_CASES", "all")
    assert drawn(items) == items


def test_the_longest_begin() -> None:
    items = [Item("a"), Item("b", 4.0), Item("c", 1.5), Item("d", 4.0)]
    assert [item.nodeid for item in sorted(items, key=conftest._turn)] == ["b", "d", "c", "a"]  # type: ignore[arg-type]
