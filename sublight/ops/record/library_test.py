"""What the dispatcher is skipped for, and on which GPU a launch is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from sublight.backend.state import is_plain
from sublight.errors import BadInput
from sublight.ops.record.call import guarded
from sublight.ops.record.library import Registered, peer


class OnGPU(torch.Tensor):
    """A tensor that says that it is on the second of two GPUs."""

    is_cuda = True
    device = torch.device("cuda", 1)

    def get_device(self) -> int:
        return 1


@pytest.mark.parametrize(("current", "entered"), [(1, []), (0, ["cuda:1"])])
def test_a_launch_is_made_on_its_tensors_gpu(monkeypatch: pytest.MonkeyPatch, current: int, entered: list[str]) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        seen.append(str(chosen))
        yield

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    x = torch.ones(2).as_subclass(OnGPU)
    first, scale = guarded(lambda first, scale: (first, scale))(x, 2.0)
    assert first is x and scale == 2.0
    assert seen == entered


def test_a_schema_gives_no_defaults() -> None:
    with pytest.raises(BadInput, match="leaves out early where it has its default"):
        Registered(schema="never_made(Tensor x, bool early=False) -> Tensor", plan=lambda x: x, fake=lambda x: x)


def test_the_cpu_goes_through_the_dispatcher() -> None:
    assert not is_plain([torch.ones(2)])


@pytest.mark.gpu
def test_only_plain_cuda_tensors_skip_the_dispatcher() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.ones(2, device="cuda")
    assert is_plain([x, torch.nn.Parameter(x)])
    assert not is_plain([x, x.cpu()])
    with FakeTensorMode() as mode:
        assert not is_plain([mode.from_tensor(x)])
    seen: list[bool] = []
    torch.func.vmap(lambda y: (seen.append(is_plain([y])), y)[1])(x)
    assert seen == [False]


def test_a_peer_that_is_not_there_is_an_import_error() -> None:
    with pytest.raises(ImportError):
        peer("no_such_library", "function")
