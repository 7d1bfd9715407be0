"""Why a run gave nothing to explain, in one sentence that is true: what ran elsewhere, or nowhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from sublight.trace.capture.steps import WHOLE_RUN

LEAST_CPU_S = 0.5  # of children together: less is no training


def cpu_of_children_s() -> float:
    """CPU seconds of the child processes that have ended."""
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The clocks when the script began."""

    children_s: float = field(default_factory=cpu_of_children_s)
    own_s: float = field(default_factory=time.process_time)

    def children_did_it(self) -> bool:
        """Whether other processes worked, and more than this one."""
        children_s, own_s = cpu_of_children_s() - self.children_s, time.process_time() - self.own_s
        return _children_live() or children_s > max(LEAST_CPU_S, own_s)


def reason(
    *, start: Start, steps_from: str, threads: list[str], has_ops: bool, error: BaseException | None, interrupted: bool
) -> str:
    """A sentence, or "" where what was recorded is worth a report."""
    if has_ops and steps_from != WHOLE_RUN:
        return ""
    if threads:
        return (
            f"the script's steps ran on another thread ({', '.join(threads[:2])}), and only the main thread is "
            "recorded: call them from the main thread, or put `with sublight.profile():` around them there"
        )
    if start.children_did_it():
        return (
            "the script's work ran in child processes, and only the process that is started is recorded: call the "
            "training function directly, or put `with sublight.profile():` into the child's code"
        )
    if has_ops:
        return ""
    if interrupted:
        return "the script was interrupted before it ran a torch op"
    if error is not None and not isinstance(error, SystemExit):
        return f"the script failed before it ran a torch op ({type(error).__name__})"
    if isinstance(error, SystemExit) and error.code not in (None, 0):
        return "the script ended itself before it ran a torch op"
    return "the script ran no torch op"


def _children_live() -> bool:
    processes = sys.modules.get("multiprocessing.process")
    return bool(processes and processes.active_children())
