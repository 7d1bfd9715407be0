"""The clock of the timed windows: when each step began, on the host and, where there is one, on the device."""

from __future__ import annotations

import itertools
import time
from typing import Any

from sublight.trace.capture.device import cuda_ready, mark

SHORT_WINDOW_S = 0.1  # very fast steps are timed until all windows together are this long,
MOST_TIMED = 50  # or there are this many
SLOW_STEP_S = 10.0  # a step this slow is timed twice and profiled once


class Ticks:
    """One window: a tick at each boundary between steps."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._marks: list[Any] = []  # CUDA events at the same boundaries

    def tick(self) -> None:
        self.times_s.append(time.perf_counter())
        if cuda_ready():
            self._marks.append(mark())

    @property
    def steps(self) -> int:
        return max(len(self.times_s) - 1, 0)

    @property
    def elapsed_s(self) -> float:
        return self.times_s[-1] - self.times_s[0]

    def is_enough(self, wanted: int) -> bool:
        """Of a window that is to have so many steps."""
        return self.steps >= wanted or (self.steps >= 2 and self.elapsed_s / self.steps > SLOW_STEP_S)

    def step_s(self) -> list[float]:
        """Each step's seconds, by the device's clock if it has marked every boundary."""
        if len(self._marks) == len(self.times_s):
            return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self._marks)]
        return [b - a for a, b in itertools.pairwise(self.times_s)]


def are_enough(total_s: float, steps: int) -> bool:
    """Of all windows together: very fast steps need more of them for a figure that holds."""
    return total_s >= SHORT_WINDOW_S or steps >= MOST_TIMED
