"""What the driver says of the GPU that torch calls cuda:0, cheaply enough to be asked between timings: which it is, its
clock, throttling and energy. None where NVML is not there. How well it is: `sublight.health`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
LIBRARY = "libnvidia-ml.so.1"
THROTTLE = {  # bit of NVML's clocks-event reasons -> its name in plain words
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The GPU at one moment."""

    clock_mhz: int
    throttle: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Which GPU and driver this is; empty where the driver does not say."""

    uuid: str
    driver: str
    name: str = ""


def _has_driver() -> bool:
    """Whether NVML's own library is here. pynvml opens the same one, and its import takes longer than a small trace's
    reading. Other systems than Linux keep it elsewhere: there pynvml looks."""
    if not sys.platform.startswith("linux") or "pynvml" in sys.modules:
        return True
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


@functools.cache
def _handle(uuid: str = "") -> tuple[Any, Any] | None:
    """NVML and the handle of the GPU of this UUID, else of the one that CUDA counts as its first."""
    if not _has_driver():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or a driver that does not answer: both mean that nothing can be asked
        return None
    try:
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid or _first_uuid(pynvml))
    except Exception:
        try:
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError:
            return None


def _first_uuid(pynvml: Any) -> str:
    """The GPU that CUDA counts as its first. Torch, whose import takes seconds, is needed only where the order
    cannot be known without it: of different GPUs CUDA puts the fastest first, unless CUDA_DEVICE_ORDER says otherwise.
    """
    handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
    uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible.startswith(("GPU-", "MIG-")):  # CUDA accepts a UUID's first letters, too
        return next((uuid for uuid in uuids if uuid.startswith(visible)), visible)
    names = {str(pynvml.nvmlDeviceGetName(handle)) for handle in handles}
    if len(names) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        import torch

        return f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    return uuids[int(visible)]


def _uuid_in_use() -> str:
    """The UUID of cuda:0 if this process already uses CUDA through torch; else empty."""
    torch = sys.modules.get("torch")
    try:
        return f"GPU-{torch.cuda.get_device_properties(0).uuid}" if torch and torch.cuda.is_initialized() else ""
    except Exception:  # a torch that is half imported, or without CUDA
        return ""


def handle() -> tuple[Any, Any] | None:
    """NVML and its handle of the GPU that torch calls cuda:0; None without NVML."""
    return _handle(_uuid_in_use())


def _ask(question: Callable[[Any, Any], _T]) -> _T | None:
    pair = handle()
    if pair is None:
        return None
    pynvml, gpu = pair
    try:
        return question(pynvml, gpu)
    except pynvml.NVMLError:
        return None


def state() -> State | None:
    """Clock and throttle reasons now."""
    clock = _ask(lambda nvml, handle: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))
    bits = _ask(lambda nvml, handle: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    if clock is None:
        return None
    return State(clock_mhz=clock, throttle=tuple(name for bit, name in THROTTLE.items() if (bits or 0) & bit))


def cuda_version() -> str | None:
    """The newest CUDA that the driver takes: '13.0'."""
    number = _ask(lambda pynvml, handle: int(pynvml.nvmlSystemGetCudaDriverVersion_v2()))
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def energy_j() -> float | None:
    """Energy since the driver was loaded."""
    millijoules = _ask(lambda nvml, handle: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
    return None if millijoules is None else millijoules * 1e-3


def health() -> Health | None:
    """Which GPU and driver this is."""
    if handle() is None:
        return None
    return Health(
        uuid=_ask(lambda nvml, gpu: str(nvml.nvmlDeviceGetUUID(gpu))) or "",
        driver=_ask(lambda nvml, gpu: str(nvml.nvmlSystemGetDriverVersion())) or "",
        name=_ask(lambda nvml, gpu: str(nvml.nvmlDeviceGetName(gpu))) or "",
    )
