"""The process in which a script runs with cures: `python -m sublight.fix.cure.child REQUEST`, JSON in, JSON out.

The script ends when its steps have been timed, at once and without its own clean-up: what it would do at its end is
done by the run that the user started. A script with a diff goes on for a while: what fails then must not be shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from sublight.fix import cure as cures
from sublight.fix.cure import landlock, native
from sublight.fix.cure.figures import Figures
from sublight.fix.cure.graphed import NAME as GRAPH
from sublight.fix.cure.record import Changes, Outcome
from sublight.fix.cure.scratch import is_below
from sublight.fix.cure.timer import StepTimer

OURS = str(Path(__file__).parents[3])  # where this package is imported from


class Child:
    """One run of the script."""

    def __init__(
        self,
        *,
        target: str,
        args: list[str],
        module: bool,
        names: list[str],
        result: str,
        folders: list[str],
        goes_on_s: float,
    ) -> None:
        from sublight.trace.capture import script as capture_script

        sys.path[:] = [_in_copy(path, *folders) for path in sys.path]
        self._target = capture_script.check(target, args, module=module)
        self._cures = [cures.find(name) for name in names]
        self._result = Path(result)
        self.changes = Changes(script=self._target.file)
        self._figures = Figures()
        self._timer = StepTimer(self._leave)
        self._stack = contextlib.ExitStack()
        self._pid = os.getpid()
        self._goes_on_s = goes_on_s

    def run(self) -> None:
        from sublight.trace.capture import profile as capture
        from sublight.trace.capture import script as capture_script

        _seed()
        native.guard(sys.modules["sublight_fence"].FENCE.check)
        with self._stack:
            self._stack.enter_context(self._figures.watch())
            for cure in self._cures:
                self._stack.enter_context(cure.install(self.changes))
            self._timer.start()
            os.register_at_fork(after_in_child=self._timer.abandon)
            capture._Current.recorder = self._timer  # type: ignore[assignment]  # whom sublight.step() tells
            ended = capture_script.run(self._target)
            capture._Current.recorder = None
            if os.getpid() != self._pid:
                raise SystemExit(ended.exit_code)
            self._timer.finish()
        has_failed = ended.error is not None and not isinstance(ended.error, SystemExit)
        self._write(error=_words(ended.error) if has_failed else self._why_not_timed(ended.error))

    def _leave(self) -> None:
        """The window has ended, in the middle of the script: so does the script, or it goes on for a while."""
        if not self._goes_on_s:
            self._stack.close()
            self._quit()
        self._write()
        timer = threading.Timer(self._goes_on_s, self._quit)
        timer.daemon = True
        timer.start()

    def _quit(self) -> NoReturn:
        self._write()
        sys.stderr.flush()
        os._exit(0)

    def _why_not_timed(self, left: BaseException | None) -> str:
        if self._timer.step_s is not None:
            return ""
        if isinstance(left, SystemExit) and left.code:  # as a script may that finds its results already there
            how = f"with status {left.code}" if isinstance(left.code, int) else f"saying {str(left.code).strip()!r}"
            return f"it left {how} before its steps were timed; its copy of the folder holds what the first run wrote"
        if not self._timer.steps_from:
            return "no steps were found in it: sublight.step() at the end of each tells"
        return f"it ended after {self._timer.seen} steps: too few to time"

    def _write(self, error: str = "") -> None:
        values, figures_of = self._figures.read()
        outcome = Outcome(
            step_s=self._timer.step_s,
            spread_s=self._timer.spread_s,
            steps=self._timer.steps,
            steps_from=self._timer.steps_from,
            figures=tuple(values),
            figures_of=figures_of,
            low_precision=self._figures.low_precision,
            did=self.changes.did,
            left=self.changes.left,
            edits=tuple(self.changes.edits if GRAPH not in self.changes.left else _without_graph(self.changes.edits)),
            error=error,
        )
        half = self._result.with_suffix(f".{threading.get_ident()}")
        half.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        half.replace(self._result)


def _without_graph(edits: list[Any]) -> list[Any]:
    return [edit for edit in edits if "sublight.graph(" not in edit.text]


def _words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def _in_copy(path: str, folder: str, copy: str) -> str:
    """The copy's, where a package of the folder was installed to be edited there."""
    if path == OURS or not is_below(path, folder):
        return path
    mine = os.path.join(copy, os.path.relpath(path, folder))
    return mine if os.path.isdir(mine) and is_below(os.path.realpath(mine), copy) else path


def _seed() -> None:
    """A script that leaves its random numbers to chance gets the same in every run, and can be compared."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(0)


def _end_with_parent() -> None:
    """Linux ends this process when the one that started it is gone, however that ended."""
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


if __name__ == "__main__":
    _end_with_parent()
    fence = sys.modules["sublight_fence"].FENCE
    landlock.restrict([*fence.roots, *fence.temporary])  # before a thread starts
    Child(**json.loads(sys.argv[1])).run()
