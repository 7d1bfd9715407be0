"""Looks at Python's stacks during a capture: at which rate, and under the name of which phase."""

from __future__ import annotations

import threading

from sublight.sampling import Sampler
from sublight.trace.capture.recording import Recording

HZ, MORE_HZ = 100.0, 500.0  # looks a second: at the first rate the steps that are timed do not notice
SWITCH_S = 0.0005  # that Python may keep its lock from the sampler: a look that comes late sees a later line


class StackLooks:
    """The sampler of one capture; where stacks are not wanted it does nothing."""

    def __init__(self, recording: Recording, *, wanted: bool) -> None:
        self._sampler = Sampler(hz=HZ)
        self._recording, self._wanted = recording, wanted

    def begin(self, label: str, hz: float = HZ) -> None:
        if self._wanted:
            self._sampler.label, self._sampler.hz = label, hz
            # threads of the script's own take turns as often as they do without us, while steps are timed
            self._sampler.switch_s = SWITCH_S if hz > HZ or threading.active_count() == 1 else 0.0
            self._sampler.start()

    def count(self, steps: int) -> None:
        """So many steps were looked at under the label of now."""
        label, counted = self._sampler.label, self._recording.sampled_steps
        counted[label] = counted.get(label, 0) + steps

    def end(self) -> None:
        if self._sampler.runs:
            self._recording.samples = self._sampler.stop()

    def abandon(self) -> None:
        """Called in a forked child: the sampling thread stayed with the parent."""
        self._sampler.abandon()
