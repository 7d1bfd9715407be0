"""Ctrl-C and SIGTERM, at any moment: the script gets them as it does without us, our own work is never cut in two.

    before   nothing was recorded: one line, and the process ends at once
    script   KeyboardInterrupt, or the script's own handler; while the recorder works they wait for it (`Shield`)
    report   the first one is answered with a line, the second one gives the report up

Handlers belong to the main thread: on any other, nothing here does anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal, NoReturn

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
INTERRUPTED = 130  # what a shell reports of a command that Ctrl-C ended
TOO_EARLY = "interrupted before the script began: there is no report"
AGAIN = "the report is being made; Ctrl-C again gives it up"
HEARD = "heard: the script ends as soon as the profiler has stopped"
LATER_S = 0.02
Stage = Literal["", "before", "script", "report"]
_exit = os._exit  # the script's may be watched


class GivenUp(KeyboardInterrupt):
    """The user asked a second time: there will be no report."""


class Terminated(SystemExit):
    """SIGTERM or SIGHUP, as the script sees it."""


class Handlers:
    """Handlers in the place of those that are there; a signal that is ignored, or that C handles, stays as it is."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def replace(self, ours: Callable[[int, Any], Any]) -> None:
        """`ours` gives a signal's new handler, from its number and the handler that was there first."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            now = signal.getsignal(number)
            if now not in (None, signal.SIG_IGN):
                first = self._before.setdefault(number, now)
                signal.signal(number, ours(number, first))

    def put_back(self) -> None:
        try:
            while self._before:
                number = next(reversed(self._before))
                signal.signal(number, self._before[number])
                del self._before[number]
        finally:
            if self._before:  # a signal came meanwhile, to a handler that is back
                self.put_back()


class Shield:
    """`with shield:` a signal waits for the block's end, and then reaches the handler that was there before."""

    def __init__(self) -> None:
        self._depth = 0
        self._handlers = Handlers()
        self._waiting: list[int] = []

    @property
    def is_up(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> Shield:
        self._depth += 1
        if self._depth == 1:
            try:
                self._handlers.replace(lambda number, first: self._note)
            except BaseException:  # the signal came a moment before the shield was up
                self.__exit__()
                raise
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        waiting, self._waiting = dict.fromkeys(self._waiting), []
        self._handlers.put_back()
        for number in waiting:
            signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)
        if len(self._waiting) == 2:
            write_line(HEARD)


class Interrupts:
    """What a signal does at each stage of a capture; `drop` removes what was written to the temporary folder."""

    def __init__(self, drop: Callable[[], None] = lambda: None) -> None:
        self.stage: Stage = ""
        self._answered: set[int] = set()  # while the report is made: a launcher may send two kinds, once each
        self._drop = drop
        self._handlers = Handlers()

    def begin(self) -> None:
        """Nothing was recorded yet, and torch may be half imported."""
        self.stage = "before"
        self._handlers.replace(lambda number, first: self._leave)

    def hand_over(self) -> None:
        """The script's turn: libraries look for Python's own handler of Ctrl-C, so it stands there."""
        self.stage = "script"
        self._handlers.replace(_of_a_script)

    def hold(self) -> None:
        """The report's turn. The script's own handlers have done their part."""
        self._handlers.replace(lambda number, first: self._answer)
        self.stage = "report"

    def put_back(self) -> None:
        """The report is out, or there is none."""
        self._handlers.put_back()

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._drop()
        quit_at_once(TOO_EARLY, 128 + number)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        if number not in self._answered:
            self._answered.add(number)
            write_line(AGAIN)
            return
        self._drop()
        raise GivenUp


def _of_a_script(number: int, first: Any) -> Any:
    """SIGTERM and SIGHUP end the script as Ctrl-C does, so that there is a report."""
    return first if number == signal.SIGINT or first != signal.SIG_DFL else _raise_exit


def in_a_child() -> None:
    """After a fork: what ended the script with a report ends a child as it does without us."""
    for number in SIGNALS:
        if signal.getsignal(number) is _raise_exit:
            signal.signal(number, signal.SIG_DFL)


def _raise_exit(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(128 + number)


@contextlib.contextmanager
def not_swallowed() -> Iterator[None]:
    """A KeyboardInterrupt that strikes in a destructor or a callback of C is lost, as Python has it: send it again."""
    theirs = sys.unraisablehook

    def hook(unraisable: Any, /) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):  # later: this hook, too, would swallow it
            timer = threading.Timer(LATER_S, os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True
            timer.start()
        else:
            theirs(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = theirs


def quit_at_once(line: str, status: int) -> NoReturn:
    """End this process without its clean-up."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
    write_line(line)
    _exit(status)


def write_line(line: str) -> None:
    """From a signal handler: whatever is being printed, this comes out as a line of its own."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nsublight: {line}\n".encode() if os.isatty(2) else f"sublight: {line}\n".encode())
