"""Where the host's time decides, PyTorch's own op is called; while a graph is captured it does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend import native
from sublight.op import Buffer, Plan
from sublight.ops.norm.rms_norm import RMS_NORM
from sublight.ops.record import call

NATIVE = SimpleNamespace(differentiates=False)
OP = SimpleNamespace(reference=torch.softmax, theirs="torch.softmax", launch=None, theirs_bytes=None, native=NATIVE)


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
    found = call.hosted(OP, plan(999), (tensor(1000), 0.5))
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
    assert call.hosted(op, mine, (x,)) is mine


def test_in_c_plus_plus_a_gradient_must_be_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.State, "module", object())
    mine, x = plan(999), tensor(1000).requires_grad_()
    assert call.hosted(OP, mine, (x,)).provider == "torch"
    with torch.no_grad():
        assert call.hosted(OP, mine, (x,)) is mine
    whole = SimpleNamespace(**{**vars(OP), "native": SimpleNamespace(differentiates=True)})
    assert call.hosted(whole, mine, (x,)) is mine


@pytest.mark.parametrize(("moved", "provider"), [(7999, "torch"), (8000, "sublight")])
def test_an_op_of_many_launches_is_weighed_by_what_pytorch_moves(moved: int, provider: str) -> None:
    op = SimpleNamespace(**{**vars(OP), "theirs": "torch.mm, torch.softmax", "theirs_bytes": lambda x: moved})
    assert call.hosted(op, plan(9999), (tensor(10),)).provider == provider


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of one process."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # PyTorch sets its own there
    distributed = pytest.importorskip("torch.distributed.tensor")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_tensor_divided_among_processes_is_pytorchs(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    x, weight = torch.randn(4, 16), torch.ones(16)
    own, columns = (distribute_tensor(each, mesh, [Shard(0)]).requires_grad_() for each in (x, weight))
    assert "divided among processes" in RMS_NORM.plan(own, columns).reason
    y = RMS_NORM.call(own, columns)
    assert torch.equal(y.full_tensor(), RMS_NORM.reference(x, weight))
    y.sum().backward()
    assert own.grad.full_tensor().shape == x.shape
