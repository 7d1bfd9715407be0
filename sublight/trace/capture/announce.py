"""What a capture costs the script, said before it happens, while it happens, and after."""

from __future__ import annotations

import time
from collections.abc import Callable

from sublight import units

WORTH_A_LINE_S = 2.0  # a wait shorter than this surprises nobody
LEAST_COST_S = 0.2  # a capture that cost less says nothing of it
# a step under the profiler, and one with every line marked, take longer: guesses, until the first profile has ended
PROFILED, MARKED = 1.5, 3.0


COMPILED_S, COMPILED = 2.0, 0.4  # compiling that took longer than this, and more than this of the run, is worth a note


def compiling_note(compile_s: float, run_s: float) -> list[str]:
    """How much faster a compiled model must have made the rest of the run, for the run not to be longer for it.

    >>> compiling_note(30.0, 40.0)
    ['torch.compile took 30.0 s of the 40.0 s that this ran: it paid only if it made all else more than 4 times faster']
    >>> compiling_note(1.0, 2.0), compiling_note(10.0, 100.0)
    ([], [])
    """
    rest_s = max(run_s - compile_s, 1e-3)
    if compile_s < COMPILED_S or compile_s < COMPILED * run_s:
        return []
    took, whole = units.text(compile_s, "s"), units.text(run_s, "s")
    faster = f"{1 + compile_s / rest_s:.2g}"
    return [
        f"torch.compile took {took} of the {whole} that this ran: it paid only if it made all else more than {faster} "
        "times faster"
    ]


class Announcer:
    """`say` prints a line; `show` writes a line that the next one replaces, where there is a terminal."""

    def __init__(self, say: Callable[[str], None], show: Callable[[str], None]) -> None:
        self.step_s = 0.0  # of the last step before the windows
        self._say, self._show = say, show
        self._last_s = 0.0
        self._began_s = 0.0

    def boundary(self) -> None:
        """Between two steps of the warm-up: how long one takes."""
        now_s = time.perf_counter()
        self.step_s, self._last_s = (now_s - self._last_s if self._last_s else 0.0), now_s

    def begin(self, steps_from: str, *, timed: int, profiled: int, marked: int) -> None:
        """The windows begin."""
        self._began_s = time.perf_counter()
        expected_s = self.step_s * (timed + PROFILED * profiled + MARKED * marked)
        if expected_s > WORTH_A_LINE_S:
            counts = {"timed": timed, "profiled": profiled, "with their lines": marked}
            parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            self._say(
                f"steps found ({steps_from}, {units.text(self.step_s, 's')} each): "
                f"the next {sum(counts.values())} are watched ({parts}), about {expected_s:.0f} s"
            )

    def window(self, name: str, steps: int, times: float) -> None:
        """One of the windows begins; a step in it takes so many times as long."""
        if times * steps * self.step_s > WORTH_A_LINE_S:
            self._say(f"{name}: {steps} step{'s' * (steps != 1)}, about {times * steps * self.step_s:.0f} s")

    def pause(self, name: str) -> None:
        """The script stands still while we do this."""
        self._show(name)

    def go_on(self) -> None:
        self._show("")

    def done(self, steps: int, steps_from: str, *, watched: int, step_s: float) -> None:
        """The script goes on alone; `watched` steps since `begin` would have taken `step_s` each."""
        extra_s = time.perf_counter() - self._began_s - watched * step_s if self._began_s else 0.0
        cost = f", which took {extra_s:.1f} s longer than without" if extra_s >= LEAST_COST_S else ""
        self._say(
            f"captured {steps} step{'s' * (steps != 1)} ({steps_from}){cost}; "
            "the script goes on, Ctrl-C ends it with the report"
        )
