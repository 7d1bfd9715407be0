"""Without a driver nothing is known and nothing fails; with one, what it says is put in words."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sublight import nvml


class NVMLError(Exception):
    pass


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """The handle is found once for a process; each test finds its own."""
    nvml._handle.cache_clear()
    yield
    nvml._handle.cache_clear()


def driver(*, without: tuple[str, ...] = (), **answers: Any) -> SimpleNamespace:
    """An NVML that gives these answers, and does not know what is in `without`."""

    def refuse(*_: Any) -> Any:
        raise NVMLError("not supported")

    known = {
        "nvmlDeviceGetClockInfo": 1980,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetTotalEnergyConsumption": 2_500,
        "nvmlDeviceGetUUID": "GPU-1",
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlSystemGetDriverVersion": "570.86",
        "nvmlDeviceGetHandleByIndex": "by index",
        "nvmlInit": None,
        **answers,
    }
    functions = {name: lambda *_, answer=answer: answer for name, answer in known.items()}
    functions |= dict.fromkeys((*without, "nvmlDeviceGetHandleByUUID"), refuse)
    return SimpleNamespace(NVMLError=NVMLError, NVML_CLOCK_SM=1, **functions)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda module: monkeypatch.setitem(sys.modules, "pynvml", module)


@pytest.mark.parametrize(
    "module",
    [None, driver(without=("nvmlInit",)), driver(without=("nvmlDeviceGetHandleByIndex",))],
    ids=["not installed", "no driver", "no GPU"],
)
def test_without_nvml_everything_is_none(use: Any, module: Any) -> None:
    use(module)
    assert (nvml.state(), nvml.energy_j(), nvml.health()) == (None, None, None)


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x0, ()),
        (0x1, ()),  # idle is no cause of a low figure
        (0x4, ("power cap",)),
        (0x8, ("hardware slowdown",)),
        (0x20, ("software thermal",)),
        (0x40, ("hardware thermal",)),
        (0x80, ("power brake",)),
        (0x4 | 0x40 | 0x1, ("power cap", "hardware thermal")),
    ],
)
def test_throttle_bits_are_put_in_words(use: Any, bits: int, words: tuple[str, ...]) -> None:
    use(driver(nvmlDeviceGetCurrentClocksThrottleReasons=bits))
    assert nvml.state() == nvml.State(clock_mhz=1980, throttle=words)


def test_what_the_driver_does_not_know_costs_only_that(use: Any) -> None:
    use(driver(without=("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetUUID")))
    assert nvml.state() == nvml.State(clock_mhz=1980, throttle=())
    assert nvml.health() == nvml.Health(uuid="", driver="570.86", name="NVIDIA H200")


def test_a_driver_without_a_clock_has_no_state(use: Any) -> None:
    use(driver(without=("nvmlDeviceGetClockInfo",)))
    assert nvml.state() is None


def test_energy_is_in_si(use: Any) -> None:
    use(driver())
    assert nvml.health() == nvml.Health(uuid="GPU-1", driver="570.86", name="NVIDIA H200")
    assert nvml.energy_j() == 2.5


def two_gpus(*names: str) -> SimpleNamespace:
    """An NVML whose handles are the GPUs' UUIDs."""
    uuids = [f"GPU-{letter}{letter}" for letter in "ab"]
    module = driver()
    module.nvmlDeviceGetCount = lambda: 2
    module.nvmlDeviceGetHandleByIndex = lambda index: uuids[index]
    module.nvmlDeviceGetUUID = lambda handle: handle
    module.nvmlDeviceGetName = lambda handle: names[uuids.index(handle)]
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    return module


@pytest.mark.parametrize(
    ("visible", "uuid"),
    [(None, "GPU-aa"), ("0", "GPU-aa"), ("1,0", "GPU-bb"), ("GPU-b", "GPU-bb"), ("7", "GPU-aa"), ("none", "GPU-aa")],
)
def test_the_first_gpu_is_the_first_that_cuda_may_see(
    use: Any, visible: str | None, uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(two_gpus("NVIDIA H200", "NVIDIA H200"))
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would fail
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    health = nvml.health()
    assert health is not None and (health.uuid, health.name) == (uuid, "NVIDIA H200")


@pytest.mark.parametrize(("initialized", "order", "uuid"), [(True, "", "GPU-bb"), (False, "", "GPU-bb"),
                                                            (False, "PCI_BUS_ID", "GPU-aa")])  # fmt: skip
def test_torch_is_asked_where_it_is_in_use_or_gpus_differ(
    use: Any, initialized: bool, order: str, uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(two_gpus("NVIDIA T4", "NVIDIA H200"))
    second = SimpleNamespace(uuid="bb")
    cuda = SimpleNamespace(is_initialized=lambda: initialized, get_device_properties=lambda _: second)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    health = nvml.health()
    assert health is not None and health.uuid == uuid


@pytest.mark.gpu
def test_a_gpu_says_how_it_is() -> None:
    health = nvml.health()
    assert health is not None
    assert health.uuid.startswith("GPU-")
    state = nvml.state()
    assert state is not None and 100 < state.clock_mhz < 5000
    assert (nvml.energy_j() or 0) > 0


def test_without_the_drivers_library_pynvml_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import takes longer than a small trace's reading."""
    monkeypatch.setattr(nvml, "LIBRARY", "libno-such-driver.so.1")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    nvml._handle.cache_clear()
    try:
        assert nvml.handle() is None and "pynvml" not in sys.modules
    finally:
        nvml._handle.cache_clear()
