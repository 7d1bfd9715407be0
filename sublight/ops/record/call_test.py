"""Where the host's time decides, PyTorch's own op is called; while a graph is captured it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend import native
from sublight.op import Buffer, Plan
from sublight.ops.record import call

OP = SimpleNamespace(reference=torch.softmax, theirs="torch.softmax", launch=None)


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def tensor(numel: int, kind: type = OnGPU) -> Any:
    return torch.empty(numel).as_subclass(kind)


def plan(numel: int) -> Plan:
    return Plan(provider="sublight", reason="ours", buffers={"y": Buffer(shape=(numel,), dtype=torch.float32)})


@pytest.fixture(autouse=True)
def python_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "SMALL_BYTES", 8000)
    monkeypatch.setattr(native.State, "module", None)


def test_a_small_call_is_pytorchs_but_ours_in_a_graph() -> None:
    found = call.hosted(OP, plan(999), [tensor(1000)])
    assert (found.provider, found.theirs, found.reason) == ("torch", "torch.softmax", "small: the host decides")
    assert found.captured is not None and found.captured.provider == "sublight"


@pytest.mark.parametrize(
    "case", ["as large as the host is slow", "two of theirs", "a formula", "no other", "on the CPU", "in C++"]
)
def test_our_kernels_take_the_others(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, x, made = OP, tensor(1000), 999
    if case == "as large as the host is slow":
        made = 1000  # bytes read and written are added up
    elif case == "two of theirs":
        op = SimpleNamespace(**{**vars(OP), "theirs": "torch.add, torch.softmax"})
    elif case == "a formula":
        op = SimpleNamespace(**{**vars(OP), "theirs": "x * cos + rotated(x) * sin"})
    elif case == "no other":
        op = SimpleNamespace(**{**vars(OP), "reference": None})
    elif case == "on the CPU":
        x = tensor(1000, torch.Tensor)
    else:
        monkeypatch.setattr(native.State, "module", object())
    mine = plan(made)
    assert call.hosted(op, mine, [x]) is mine
