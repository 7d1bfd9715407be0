"""Time a script's steps as `explain` does before it profiles: some to warm up, then a window between two waits for the
device, with nothing but a clock at each boundary. No profiler runs at all, and the script is ended when the window is.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Literal

from sublight.trace.capture.device import in_graph_capture, synchronize
from sublight.trace.capture.steps import STEPS_FROM, Kind, StepFinder

WARMUP = 8  # a graph's own warm-up and capture, and what a cure does when a batch comes again, lie inside
LEAST, MOST = 5, 50  # steps in the window,
WINDOW_S = 0.3  # which is this long at least
SLOW_STEP_S = 10.0  # of steps this slow, two are enough


class StepTimer:
    """One run; `done` is called when the window ends, in the middle of the script."""

    def __init__(self, done: Callable[[], None], *, warmup: int = WARMUP) -> None:
        self.finder = StepFinder(self)
        self.steps_from = ""
        self.step_s: float | None = None
        self.spread_s = 0.0
        self.steps = 0
        self.seen = 0  # boundaries since the steps were found
        self._done, self._left = done, warmup
        self._phase: Literal["finding", "warmup", "timed", "done"] = "finding"
        self._times_s: list[float] = []

    def start(self) -> None:
        self.finder.install()

    def abandon(self) -> None:
        """Stop timing in a forked child: only the parent times."""
        self._phase = "done"
        self.finder.stop()

    def finish(self) -> None:
        """The script ended by itself: what was timed by then, if two steps were."""
        self.finder.remove()
        if self._phase == "timed" and len(self._times_s) > 2:
            self._end(self._times_s[-1])
        self._phase = "done"

    def candidate(self, kind: Kind) -> None:
        pass

    def settled(self, kind: Kind) -> None:
        self.steps_from, self._phase = STEPS_FROM[kind], "warmup"

    def boundary(self) -> None:
        if in_graph_capture():
            return
        self.seen += 1
        if self._phase == "warmup":
            self._left -= 1
            if self._left <= 0:
                self._phase = "timed"
                self.finder.freeze()
                synchronize()
                self._times_s = [time.perf_counter()]
        elif self._phase == "timed":
            self._times_s.append(time.perf_counter())
            if self._is_enough():
                synchronize()
                self._end(time.perf_counter())
                self._phase = "done"
                self._done()

    def _is_enough(self) -> bool:
        steps, elapsed = len(self._times_s) - 1, self._times_s[-1] - self._times_s[0]
        if steps >= 2 and elapsed > SLOW_STEP_S * steps:
            return True
        return steps >= MOST or (steps >= LEAST and elapsed >= WINDOW_S)

    def _end(self, end_s: float) -> None:
        self.steps = len(self._times_s) - 1
        self.step_s = (end_s - self._times_s[0]) / self.steps
        each = sorted(after - before for before, after in itertools.pairwise(self._times_s))
        if len(each) >= 4:  # of their mean: a host that runs ahead and then waits has steps of all lengths
            low, _, high = statistics.quantiles(each, n=4)
            self.spread_s = (high - low) / 2 / math.sqrt(len(each))
