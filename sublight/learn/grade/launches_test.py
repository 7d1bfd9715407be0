"""Launches are told apart by what they do, not by where their memory happens to lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.learn.grade.launches import difference, words_of


def kernel(x_ptr: Any, n: Any, BLOCK: Any) -> None: ...


JIT = SimpleNamespace(fn=kernel, arg_names=["x_ptr", "n", "BLOCK"])


def words(n: Any, x: Any, grid: tuple[int, ...] = (4,)) -> str:
    return words_of(JIT, grid, {"x_ptr": x, "n": n, "BLOCK": 128}, [x])


def test_an_address_is_a_place_in_its_tensor() -> None:
    one, other = torch.zeros(64), torch.zeros(64)
    assert words(one.data_ptr() + 8, one) == words(other.data_ptr() + 8, other)
    assert words(one.data_ptr() + 8, one) != words(other.data_ptr() + 12, other)


@pytest.mark.parametrize(("ran", "word"), [((500, (4,)), "n': 500"), ((512, (3,)), "grid (3, 1, 1)")])
def test_what_differs_is_named(ran: tuple[int, tuple[int, ...]], word: str) -> None:
    x = torch.zeros(512)
    assert difference([words(512, x)], [words(512, x)]) == ""
    assert word in difference([words(512, x)], [words(ran[0], x, ran[1])])
    assert "nothing" in difference([words(512, x)], [words(512, x)] * 2)


class constexpr:  # noqa: N801 - by this name Triton's own is known
    def __init__(self, value: Any) -> None:
        self.value = value


def made(way: int) -> Any:
    WAY = constexpr(way)

    def helper() -> Any:
        return WAY

    jit_helper = SimpleNamespace(fn=helper)

    def outer() -> Any:
        return jit_helper

    return SimpleNamespace(fn=outer, arg_names=["f"])


def test_constants_of_helpers_and_closures_are_named() -> None:
    one, other = (words_of(made(way), (4,), {}) for way in (1, 2))
    assert one.endswith("'jit_helper: WAY': 1}") and one.replace("WAY': 1", "WAY': 2") == other


def test_functions_that_a_kernel_is_given_are_told_apart() -> None:
    first, again, other = (words_of(JIT, (4,), {"f": SimpleNamespace(fn=made(way).fn)}) for way in (1, 1, 2))
    assert first == again != other
