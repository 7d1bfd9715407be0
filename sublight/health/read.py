"""One snapshot after another: every GPU that some back end sees, the host, and the versions that must fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sublight import nvml as driver
from sublight.health import host, nvidia, sysfs
from sublight.health.ask import ask
from sublight.health.record import GpuState, Snapshot, Unavailable, Vendor, Versions
from sublight.health.versions import with_torch

APART_S = 0.2  # two looks, between which GPM and the kernel's counters count; GPM wants 0.1 s
NO_LIBRARY = "nvidia-ml-py is not installed: pip install nvidia-ml-py"


class Reader:
    """Reads this machine again and again."""

    def __init__(
        self, *, nvml: Any = None, clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`nvml`: pynvml, or what stands in for it."""
        self._clock, self._sleep = clock, sleep
        self._nvidia = _nvidia(nvml)
        self._host = host.Reader()
        unread = self._nvidia
        versions = Versions(driver=unread, driver_cuda=unread) if isinstance(unread, Unavailable) else unread.versions()
        self._versions = with_torch(versions)
        self._is_first = True

    def read(self) -> Snapshot:
        """The machine now. The first reading waits a moment, so that there is something to count."""
        if self._is_first:
            self._is_first = False
            self._sleep(APART_S)
        gpus: list[GpuState] = []
        without: dict[str, str] = {}
        if isinstance(self._nvidia, Unavailable):
            without["NVIDIA"] = self._nvidia.reason
        else:
            gpus += self._nvidia.read()
            if not gpus:
                without["NVIDIA"] = "the driver is there, and sees no GPU"
        others: tuple[Vendor, ...] = ("AMD", "Intel")
        for vendor in others:
            found = sysfs.read(vendor, len(gpus))
            if isinstance(found, Unavailable):
                without[vendor] = found.reason
            else:
                gpus += found
        return Snapshot(
            time_s=self._clock(),
            gpus=tuple(gpus),
            host=self._host.read(),
            versions=self._versions,
            without=tuple(without.items()),
        )


def _nvidia(nvml: Any) -> nvidia.Reader | Unavailable:
    """A reader of NVIDIA's GPUs, or why there is none."""
    if nvml is not None:
        return ask(nvml, nvidia.Reader)
    try:
        import pynvml
    except ImportError:
        return Unavailable(NO_LIBRARY)
    return ask(pynvml, nvidia.Reader)


def this_gpu() -> GpuState | None:
    """The GPU that torch calls cuda:0, for those who measure on it; None where it is not known. Counts no activity."""
    found = driver.handle()
    if found is None:
        cards = sysfs.read("AMD")
        return cards[0] if isinstance(cards, tuple) and len(cards) == 1 else None  # of several, which is torch's?
    nvml, handle = found
    reader = ask(nvml, lambda nvml: nvidia.Reader(nvml, [handle]))
    return None if isinstance(reader, Unavailable) else next(iter(reader.read()), None)
