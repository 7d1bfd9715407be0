"""How busy other programs keep this machine's processors: a figure measured beside them is no limit of the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sublight import units

BUSY_SHARE = 0.1  # where others use more than this share of our processors, a figure is marked
QUIET_S = 0.2  # how long `is_quiet` watches the machine
STAT = Path("/proc/stat")


class Watch:
    """Counts the share of the processors that other programs used since this object was made."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()

    def share(self) -> float | None:
        """The others' share, from 0 to 1; None where the system does not count CPU time."""
        busy_s, elapsed_s = _busy_s(), time.monotonic() - self._began_s
        if busy_s is None or self._busy_s is None or elapsed_s <= 0:
            return None
        others_s = (busy_s - self._busy_s) - (_own_s() - self._own_s)
        return min(max(others_s / (elapsed_s * len(processors())), 0.0), 1.0)


def words(share: float | None) -> list[str]:
    """What there is to say of the others' share.

    >>> words(0.84), words(0.02), words(None)
    (['other programs used 84 % of the processors: measure again when they do not'], [], [])
    """
    if share is None or share < BUSY_SHARE:
        return []
    return [f"other programs used {units.percent(share)} of the processors: measure again when they do not"]


def is_quiet() -> bool:
    """Whether other programs leave the machine alone just now; takes a moment."""
    watch = Watch()
    time.sleep(QUIET_S)
    share = watch.share()
    return share is None or share < BUSY_SHARE


def processors() -> frozenset[int]:
    """The numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def threads() -> int:
    """How many threads torch uses for an op, unless a script sets another number."""
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(setting) if setting.isdigit() and int(setting) > 0 else len(processors())


def _busy_s() -> float | None:
    """CPU time that all programs together have had on our processors."""
    try:
        lines = STAT.read_text().splitlines()
    except OSError:
        return None
    mine, ticks = processors(), 0
    for line in lines:
        name, _, numbers = line.partition(" ")
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in mine:
            user, nice, system, _idle, _waiting, *others = map(int, numbers.split()[:8])
            ticks += user + nice + system + sum(others)  # interrupts, and what the host of a virtual machine took
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    return sum(os.times()[:4])
