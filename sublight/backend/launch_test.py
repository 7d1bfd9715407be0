"""Quick launches: the same kernel with the same arguments as Triton's own launch, or Triton's own launch."""

from __future__ import annotations

import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from sublight.backend import launch as launching
from sublight.backend.jit import tl

triton = launching.quick(SimpleNamespace(jit=JITFunction))  # compiled, though other tests run by the interpreter


@triton.jit
def _kernel(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr, NEGATE: tl.constexpr = False):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n, other=0.0) * scale
    tl.store(y_ptr + place, -x if NEGATE else x, mask=place < n)


class Compiled:
    """Stands for a compiled kernel; notes what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches: list[Any]) -> None:
        self.run = lambda *args: launches.append((self, args))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Launches through Triton, and quick ones."""
    told: dict[str, list[Any]] = {"theirs": [], "quick": []}

    def run(self: Any, *args: Any, **kwargs: Any) -> Compiled:
        told["theirs"].append((args, kwargs))
        return Compiled(told["quick"])

    backend = make_backend(GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launching, "THEIRS", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(_kernel, "device_caches", {0: ({}, {}, None, backend, None)})
    monkeypatch.setattr(_kernel, "known", {})
    return told


def test_the_second_launch_alike_is_quick(told: dict[str, list[Any]]) -> None:
    x, y, z = (torch.empty(64) for _ in range(3))
    first = _kernel[(3,)](x, y, 32, 0.5, BLOCK=16, num_warps=4)
    assert len(told["theirs"]) == 1 and not told["quick"]
    assert _kernel[(5, 2)](y, z, 48, 1.5, BLOCK=16, num_warps=4) is first
    assert len(told["theirs"]) == 1
    (kernel, args), *more = told["quick"]
    assert kernel is first and not more
    assert args == (5, 2, 1, 7, "function", "metadata", None, None, None, y, z, 48, 1.5, 16, False)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ((x, x[1:], 32, 0.5), {"BLOCK": 16}),  # begins elsewhere
        lambda x: ((x, x.half(), 32, 0.5), {"BLOCK": 16}),  # another data type
        lambda x: ((x, x, 33, 0.5), {"BLOCK": 16}),  # 16 does not divide it
        lambda x: ((x, x, 1, 0.5), {"BLOCK": 16}),  # Triton makes a one a constant
        lambda x: ((x, x, 2**33, 0.5), {"BLOCK": 16}),  # 64 bits
        lambda x: ((x, x, 32, 0.5), {"BLOCK": 32}),
        lambda x: ((x, x, 32, 0.5), {"BLOCK": 16, "NEGATE": True}),
        lambda x: ((x, x, 32, 0.5), {"BLOCK": 16, "num_warps": 8}),
    ],
)
def test_what_would_be_another_kernel_goes_through_triton(told: dict[str, list[Any]], other: Any) -> None:
    x = torch.empty(64)
    _kernel[(1,)](x, x, 32, 0.5, BLOCK=16)
    args, kwargs = other(x)
    _kernel[(1,)](*args, **kwargs)
    assert len(told["theirs"]) == 2 and not told["quick"]


def test_what_the_key_does_not_tell_is_never_quick(told: dict[str, list[Any]]) -> None:
    x = torch.empty(64)
    for _ in range(2):
        _kernel[(1,)](x, x, 32, 0.5, 16)  # a constant by its place
        _kernel[(1,)](x, y_ptr=x, n=32, scale=0.5, BLOCK=16)  # a tensor by its name
        for scale in (2, 2.0, True):  # equal, and of three types
            _kernel[(1,)](x, x, 32, scale=scale, BLOCK=16)
    assert len(told["theirs"]) == 10 and not told["quick"] and not _kernel.known


def test_a_kernel_that_a_hook_of_the_cache_withholds_is_asked_for_again(told: Any, monkeypatch: Any) -> None:
    def withheld(*args: Any, **kwargs: Any) -> None:
        return None

    monkeypatch.setattr(JITFunction, "run", withheld)
    monkeypatch.setattr(launching, "THEIRS", withheld)
    x = torch.empty(64)
    for _ in range(2):
        assert _kernel[(1,)](x, x, 32, 0.5, BLOCK=16) is None


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("runtime", "debug", True),
        ("compilation", "instrumentation_mode", "consan"),
        ("runtime", "add_stages_inspection_hook", print),
    ],
)
def test_other_settings_make_other_kernels(told: Any, monkeypatch: Any, where: str, name: str, value: Any) -> None:
    x = torch.empty(64)
    _kernel[(1,)](x, x, 32, 0.5, BLOCK=16)
    with monkeypatch.context() as changed:
        changed.setattr(getattr(launching.knobs, where), name, value)
        _kernel[(1,)](x, x, 32, 0.5, BLOCK=16)
    assert len(told["theirs"]) == 2 and not told["quick"]
    _kernel[(1,)](x, x, 32, 0.5, BLOCK=16)
    assert len(told["quick"]) == 1


def test_who_watches_sees_every_launch(told: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(64)
    _kernel[(1,)](x, x, 32, 0.5, BLOCK=16)
    monkeypatch.setattr(launching.knobs.runtime.launch_enter_hook, "calls", [print])
    _kernel[(1,)](x, x, 32, 0.5, BLOCK=16)
    monkeypatch.undo()
    assert not told["quick"]


def test_who_watched_before_we_came_sees_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: None)
    assert runpy.run_path(launching.__file__)["THEIRS"] is None


def test_what_is_known_stays_few(told: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST_KNOWN", 3)
    x = torch.empty(64)
    for block in (16, 32, 64, 128, 256):
        _kernel[(1,)](x, x, 32, 0.5, BLOCK=block)
    assert len(_kernel.known) == 2


@pytest.mark.gpu
def test_on_a_gpu_quick_launches_give_what_triton_gives() -> None:
    for size in (1, 16, 33, 64, 100, 1000):
        for begin in (0, 1, 8):
            for dtype in (torch.float32, torch.float16):
                x = torch.randn(size + begin, device="cuda", dtype=dtype)[begin:]
                for negate in (False, True, False, True):
                    y = torch.full_like(x, float("nan"))
                    _kernel[(-(-size // 64),)](x, y, size, 2.0, BLOCK=64, NEGATE=negate)
                    assert torch.equal(y, -2 * x if negate else 2 * x), (size, begin, dtype, negate)
    assert len(_kernel.known) >= 8
