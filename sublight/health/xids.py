"""XIDs, the numbered errors of NVIDIA's driver: from the kernel's log where it may be read, and from NVML's events."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from sublight.health.record import Unavailable, Xid

KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # the kernel gives one record a read
_LINE = re.compile(r"(?:^\d+,\d+,(\d+),.*?;.*)?NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, )?(.*)")


def in_kernel_log() -> list[tuple[str, Xid]] | Unavailable:
    """Bus id and error, oldest first."""
    try:
        handle = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError:
        return Unavailable("the kernel log needs root: sudo dmesg | grep Xid")
    except OSError as error:
        return Unavailable(f"no kernel log here: {error.strerror}")
    log = b""
    try:
        while record := os.read(handle, _RECORD_BYTES):
            log += record
    except BlockingIOError:
        pass  # all that there is
    except OSError as error:
        return Unavailable(f"the kernel log cannot be read: {error.strerror}")
    finally:
        os.close(handle)
    return [found for line in log.decode(errors="replace").splitlines() if (found := parse(line))]


def parse(line: str, now_s: float | None = None) -> tuple[str, Xid] | None:
    """A record begins with its level, number and microseconds since the machine was started.

    >>> parse("4,1,5000000,-;NVRM: Xid (PCI:0000:17:00): 79, pid=123, GPU has fallen off the bus.", now_s=65.0)
    ('0000:17:00', Xid(number=79, words='pid=123, GPU has fallen off the bus.', age_s=60.0))
    """
    match = _LINE.search(line)
    if match is None:
        return None
    now_s = time.monotonic() if now_s is None else now_s
    age_s = max(0.0, now_s - int(match[1]) * 1e-6) if match[1] else Unavailable("the log has no time")
    return match[2].lower(), Xid(number=int(match[3]), words=match[4].strip(), age_s=age_s)


def same_bus(ours: str, theirs: str) -> bool:
    """NVML writes eight digits of domain and the function; the kernel four and none.

    >>> same_bus("00000000:17:00.0", "0000:17:00"), same_bus("00000000:17:00.0", "0000:18:00")
    (True, False)
    """
    return _short(ours) == _short(theirs)


def _short(bus_id: str) -> tuple[str, ...]:
    domain, _, rest = bus_id.lower().partition(":")
    return (domain.lstrip("0"), rest.partition(".")[0])
