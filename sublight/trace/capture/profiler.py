"""PyTorch's profiler as a capture uses it: one profile after the other, each written to a file as soon as it ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sublight.trace.capture.folder import Folder
from sublight.trace.capture.guard import Guard, OpenRanges


class Profiler:
    """At most one profile at a time, on the thread that starts it."""

    def __init__(self, folder: Folder, *, notes: list[str], give_way: Callable[[], None]) -> None:
        self._folder, self._notes = folder, notes
        self._guard = Guard(give_way)
        self._open_ranges = OpenRanges()
        self._profile: Any = None

    @property
    def runs(self) -> bool:
        return self._profile is not None

    def install(self) -> None:
        self._guard.install()

    def remove(self) -> None:
        self._guard.remove()

    def forget(self) -> None:
        """Called in a forked child: drop the profile, which is the parent's."""
        self._guard.remove()
        self._profile = None

    def start(self, *, cuda: bool, memory: bool, shapes: bool = True) -> bool:
        """False, with a note, where another profiler runs."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        try:
            with self._guard.ours(), _no_warnings():
                started = profile(activities=activities, record_shapes=shapes, profile_memory=memory)
                started.start()
        except RuntimeError as error:
            self._notes.append(f"the profiler did not start: {str(error).splitlines()[0]}")
            return False
        self._open_ranges.begin()
        self._profile = started
        return True

    def stop(self, keep: str = "") -> Path | None:
        """Stop, and write what it saw at once: the next profile takes the memory of the last."""
        stopped, self._profile = self._profile, None
        if stopped is None:
            return None
        self._open_ranges.end()
        try:
            with self._guard.ours(), _no_warnings():
                stopped.stop()
                if not keep:
                    return None
                file = self._folder.file(keep)
                stopped.export_chrome_trace(str(file))
                return file
        except RuntimeError as error:
            self._notes.append(f"a profile was lost: {str(error).splitlines()[0]}")
            return None


def _no_warnings() -> Any:
    """The profiler's own: they speak of options that the script did not choose."""
    return warnings.catch_warnings(action="ignore")
