"""The machine around the GPUs: processors, memory, disk, network, and what work waits for (the kernel's PSI).

On Linux from /proc, which needs no library; elsewhere through psutil.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublight.health.record import Host, Number, Pressure, Unavailable

PROC = Path("/proc")
SECTOR_BYTES = 512  # of /proc/diskstats, whatever the disk's own are
NO_PRESSURE = Unavailable("the kernel does not count it (PSI needs Linux 4.20, and psi=1 on some)")
NO_PSUTIL = Unavailable("needs psutil on this system: pip install psutil")
FIRST = Unavailable("counted from the second look on")
TOO_SOON = Unavailable("the system's counters have not moved since the last look")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    """What only ever grows; two of them give rates."""

    at_s: float
    busy_s: float
    idle_s: float
    read_bytes: float
    write_bytes: float
    received_bytes: float
    sent_bytes: float


class Reader:
    """Reads the host again and again; rates are counted from one reading to the next."""

    def __init__(self, *, psutil: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`psutil`: read through it, whatever the system is."""
        self._psutil = psutil if psutil is not None or PROC.joinpath("stat").exists() else _psutil()
        self._clock = clock
        self._last = self._counters()

    def read(self) -> Host:
        before, self._last = self._last, self._counters()
        total, available, swap = self._memory()
        disk = _disk()
        return Host(
            cpu=cpu_model(),
            cpus=os.cpu_count() or 0,
            load_1min=os.getloadavg()[0] if hasattr(os, "getloadavg") else Unavailable("this system has no load"),
            host_memory_total_bytes=total,
            host_memory_available_bytes=available,
            swap_used_bytes=swap,
            disk_total_bytes=disk if isinstance(disk, Unavailable) else disk[0],
            disk_free_bytes=disk if isinstance(disk, Unavailable) else disk[1],
            pressure=_pressure(),
            **_rates(before, self._last),
        )

    def _counters(self) -> _Counters | Unavailable:
        at_s = self._clock()
        if isinstance(self._psutil, Unavailable):
            return self._psutil
        return _counters_of_psutil(self._psutil, at_s) if self._psutil else _counters_of_proc(at_s)

    def _memory(self) -> tuple[Any, Any, Any]:
        if isinstance(self._psutil, Unavailable):
            return (self._psutil,) * 3
        if self._psutil:
            memory = self._psutil.virtual_memory()
            return memory.total, memory.available, self._psutil.swap_memory().used
        pairs = (line.split(":") for line in _lines("meminfo"))
        size = {name: int(words.split()[0]) * 1024 for name, words in pairs}
        return size["MemTotal"], size["MemAvailable"], size["SwapTotal"] - size["SwapFree"]


def cpu_model() -> str:
    for line in _lines("cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _psutil() -> Any:
    try:
        import psutil
    except ImportError:
        return NO_PSUTIL
    return psutil


def _lines(name: str) -> list[str]:
    try:
        return (PROC / name).read_text().splitlines()
    except OSError:
        return []


def _counters_of_proc(at_s: float) -> _Counters:
    user, nice, system, idle, waiting, *others = map(int, _lines("stat")[0].split()[1:9])
    tick = os.sysconf("SC_CLK_TCK")
    disks = [line.split() for line in _lines("diskstats")]
    whole = [row for row in disks if not row[2].startswith(("loop", "ram", "dm-", "md")) and not _is_part(row[2])]
    links = [line.replace(":", " ").split() for line in _lines("net/dev")[2:]]
    return _Counters(
        at_s=at_s,
        busy_s=(user + nice + system + sum(others)) / tick,
        idle_s=(idle + waiting) / tick,
        read_bytes=sum(int(row[5]) for row in whole) * SECTOR_BYTES,
        write_bytes=sum(int(row[9]) for row in whole) * SECTOR_BYTES,
        received_bytes=sum(int(row[1]) for row in links if row[0] != "lo"),
        sent_bytes=sum(int(row[9]) for row in links if row[0] != "lo"),
    )


def _is_part(name: str) -> bool:
    """A partition, whose bytes its disk counts, too."""
    return Path("/sys/class/block", name, "partition").exists()


def _counters_of_psutil(psutil: Any, at_s: float) -> _Counters:
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice, too
    disk, links = psutil.disk_io_counters(), psutil.net_io_counters(pernic=True)
    outside = [link for name, link in links.items() if not name.startswith("lo")]
    return _Counters(
        at_s=at_s,
        busy_s=sum(times) - idle_s - guest_s,
        idle_s=idle_s,
        read_bytes=disk.read_bytes if disk else 0,
        write_bytes=disk.write_bytes if disk else 0,
        received_bytes=sum(link.bytes_recv for link in outside),
        sent_bytes=sum(link.bytes_sent for link in outside),
    )


def _rates(before: _Counters | Unavailable, now: _Counters | Unavailable) -> dict[str, Number]:
    names = {
        "disk_read_bytes_per_s": "read_bytes",
        "disk_write_bytes_per_s": "write_bytes",
        "net_received_bytes_per_s": "received_bytes",
        "net_sent_bytes_per_s": "sent_bytes",
    }
    if isinstance(before, Unavailable) or isinstance(now, Unavailable):
        why = now if isinstance(now, Unavailable) else FIRST
        return dict.fromkeys(("cpu_share", *names), why)
    elapsed_s = now.at_s - before.at_s
    # the time that a core waits for a disk is counted as idle, and may be taken back
    busy_s, idle_s = max(0.0, now.busy_s - before.busy_s), max(0.0, now.idle_s - before.idle_s)
    found: dict[str, Number] = {"cpu_share": busy_s / (busy_s + idle_s) if busy_s + idle_s > 0 else TOO_SOON}
    for name, counter in names.items():
        grown = getattr(now, counter) - getattr(before, counter)
        # a disk that was taken out takes its count
        found[name] = max(grown, 0) / elapsed_s if elapsed_s > 0 else TOO_SOON
    return found


def _disk() -> tuple[int, int] | Unavailable:
    try:
        usage = shutil.disk_usage(Path.cwd())
    except OSError as error:
        return Unavailable(f"the working folder cannot be read: {error.strerror}")
    return usage.total, usage.free


def _pressure() -> Pressure:
    return Pressure(
        cpu_some_share=_waited("cpu", "some"),
        memory_some_share=_waited("memory", "some"),
        memory_full_share=_waited("memory", "full"),
        io_some_share=_waited("io", "some"),
        io_full_share=_waited("io", "full"),
    )


def _waited(what: str, who: str) -> Number:
    for line in _lines(f"pressure/{what}"):
        if line.startswith(who):
            return float(line.split("avg10=")[1].split()[0]) / 100
    return NO_PRESSURE
