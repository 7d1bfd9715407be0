"""What the driver says of the GPU: clock, throttling, energy, neighbours, link. None where NVML is not there."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
_THROTTLE = {  # bit of NVML's clocks-event reasons -> what a person calls it
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
    """What may explain a low figure; None where the driver does not say."""

    uuid: str
    driver: str
    others: int  # processes on this GPU besides ours
    used_by_others_bytes: int
    pcie: tuple[int, int] | None  # generation and width now
    pcie_max: tuple[int, int] | None
    ecc: bool | None
    power_limit_w: float | None
    power_default_w: float | None
    state: State
    name: str = ""


@functools.cache
def _handle(uuid: str = "") -> tuple[Any, Any] | None:
    """NVML and the handle of the GPU of this UUID, else of the one that CUDA counts as its first."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: both mean that nothing can be asked
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
    if visible.startswith(("GPU-", "MIG-")):  # maybe only the first letters of it
        return next((uuid for uuid in uuids if uuid.startswith(visible)), visible)
    names = {str(pynvml.nvmlDeviceGetName(handle)) for handle in handles}
    if len(names) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        import torch

        return f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    return uuids[int(visible)]


def _uuid_in_use() -> str:
    """Of cuda:0, where this process uses CUDA through torch already; empty where it does not."""
    torch = sys.modules.get("torch")
    try:
        return f"GPU-{torch.cuda.get_device_properties(0).uuid}" if torch and torch.cuda.is_initialized() else ""
    except Exception:  # a torch that is half imported, or without CUDA
        return ""


def _ask(question: Callable[[Any, Any], _T]) -> _T | None:
    found = _handle(_uuid_in_use())
    if found is None:
        return None
    pynvml, handle = found
    try:
        return question(pynvml, handle)
    except pynvml.NVMLError:
        return None


def state() -> State | None:
    """Clock and throttle reasons now."""
    clock = _ask(lambda nvml, handle: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))
    bits = _ask(lambda nvml, handle: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    if clock is None:
        return None
    return State(clock_mhz=clock, throttle=tuple(name for bit, name in _THROTTLE.items() if (bits or 0) & bit))


def energy_j() -> float | None:
    """Energy since the driver was loaded."""
    millijoules = _ask(lambda nvml, handle: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
    return None if millijoules is None else millijoules * 1e-3


def health() -> Health | None:
    """All that may explain a low figure."""
    now = state()
    if now is None:
        return None
    processes = _ask(lambda nvml, handle: list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))) or []
    others = [process for process in processes if process.pid != os.getpid()]
    return Health(
        uuid=_ask(lambda nvml, handle: str(nvml.nvmlDeviceGetUUID(handle))) or "",
        driver=_ask(lambda nvml, handle: str(nvml.nvmlSystemGetDriverVersion())) or "",
        others=len(others),
        used_by_others_bytes=sum(process.usedGpuMemory or 0 for process in others),
        pcie=_ask(lambda n, h: (n.nvmlDeviceGetCurrPcieLinkGeneration(h), n.nvmlDeviceGetCurrPcieLinkWidth(h))),
        pcie_max=_ask(lambda n, h: (n.nvmlDeviceGetMaxPcieLinkGeneration(h), n.nvmlDeviceGetMaxPcieLinkWidth(h))),
        ecc=_ask(lambda nvml, handle: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),
        power_limit_w=_ask(lambda nvml, handle: nvml.nvmlDeviceGetPowerManagementLimit(handle) * 1e-3),
        power_default_w=_ask(lambda nvml, handle: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) * 1e-3),
        state=now,
        name=_ask(lambda nvml, handle: str(nvml.nvmlDeviceGetName(handle))) or "",
    )
