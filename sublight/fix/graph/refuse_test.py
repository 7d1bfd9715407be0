"""What the listener finds; the device that a machine without a GPU has for it is `meta`."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

from sublight.fix.graph.refuse import OPTIMIZER, Watch, line_of, storage, waits_heard
from sublight.fix.patch.tables import Looks


def here() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def watched(fn: Any, *inputs: torch.Tensor) -> Watch:
    watch = Watch(list(inputs), "meta")
    with watch:
        watch.result = fn(*inputs)  # type: ignore[attr-defined]  # kept alive
    return watch


def adamw() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([p], foreach=False)
    optimizer.step()
    watch = Watch([], "meta")
    with watch:
        optimizer.step()
    assert watch.refusal is not None and watch.refusal.reason == OPTIMIZER


def test_the_optimizer_that_counts_on_the_cpu_is_named() -> None:
    adamw()


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: torch.ones(3).to("meta") + x, "copied from the CPU"),
        (lambda x: x.copy_(torch.ones(3)), "copied from the CPU"),
        (lambda x: x + torch.rand(()), "drawn on the CPU"),
        (lambda x: (HOST.add_(1), x)[1], "a CPU tensor is changed"),
        (lambda x: x * 2, None),
        (lambda x: x + torch.tensor(2.0), None),
        (lambda x: torch.rand_like(x), None),
        (lambda x: (torch.ones(3).add_(1), x)[1], None),
    ],
)
def test_reasons(fn: Any, reason: str | None) -> None:
    watch = watched(fn, meta(3))
    if reason is None:
        assert watch.refusal is None
    else:
        assert watch.refusal is not None and reason in watch.refusal.reason
        assert f"refuse_test.py:{fn.__code__.co_firstlineno}" in watch.refusal.line


HOST = torch.zeros(3)


def test_what_it_reads_writes_and_makes() -> None:
    weight, x = meta(3), meta(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        weight.mul_(2)
        return x + weight

    watch = watched(fn, x)
    assert set(watch.outside) == {storage(weight)} and watch.written == {storage(weight)}
    assert watch.made(watch.result) and not watch.made(x)  # type: ignore[attr-defined]
    assert watch.left_behind([watch.result]) is None  # type: ignore[attr-defined]
    assert watch.left_behind([]) is not None
    assert not watch.ran_backward and not watch.is_random


def test_the_backward_pass_is_heard() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    assert watched(lambda: (w * 2).sum().backward()).ran_backward


def test_waits_are_heard_with_their_line() -> None:
    found, modes = [], []
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with waits_heard(lambda reason, line: found.append((reason, line)), modes.append, 0):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1)", stacklevel=1)
            line = here() - 1
            warnings.warn("something else", stacklevel=1)
    assert [str(each.message) for each in others] == ["something else"]
    assert len(found) == 1 and f"refuse_test.py:{line}" in found[0][1]
    assert modes == [1, 0]


def test_the_line_of_an_error() -> None:
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        assert f"refuse_test.py:{here() - 2}" in line_of(error)


def test_a_patched_model_may_look_at_its_rotary_tables() -> None:
    cos, sin, looks = torch.ones(1, 3, 8), torch.zeros(1, 3, 8), Looks("halves")
    with Watch([cos, sin], "cpu") as watch:
        assert looks.are_as_expected(cos, sin)
    assert watch.refusal is None and watch.left_behind([]) is None
