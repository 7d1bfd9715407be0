"""`sublight explain --fix`: say what will be run and ask, before the script runs at all; then try the cures."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sublight import units
from sublight.cli.explain_output import Wanted, say
from sublight.errors import BadInput

if TYPE_CHECKING:
    from sublight.diagnose.record import Explanation
    from sublight.fix.cure.record import Fixed
    from sublight.fix.cure.scratch import Scratch


class Trying:
    """The trials of one command: the user agrees before the script runs, they are made after it."""

    def __init__(self, target: str, args: tuple[str, ...], *, is_module: bool, wanted: Wanted) -> None:
        self._target, self._args, self._is_module, self._wanted = target, args, is_module, wanted
        self._began_s = 0.0

    def agree(self) -> None:
        """Say what will be run, and ask; BadInput unless the answer is yes."""
        from sublight import nvml
        from sublight.diagnose.cures import most_runs
        from sublight.fix.cure import landlock

        options = self._wanted.fix_options
        planned = self._planned()
        runs = most_runs(on_gpu=nvml.health() is not None)
        if not options.yes and not sys.stdin.isatty():
            raise BadInput(
                f"--fix runs the script up to {1 + runs} times and asks first, and there is no terminal to ask at: "
                "add --yes; nothing was run"
            )
        self._say_what_happens(runs, planned, has_kernel=landlock.version() > 0)
        if not options.yes:
            print("sublight: go on? [y/N] ", end="", file=sys.stderr, flush=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                raise BadInput("--fix was not agreed to: nothing was run")
        self._began_s = time.monotonic()

    def _planned(self) -> Scratch:
        from sublight.fix.cure import scratch

        options = self._wanted.fix_options
        return scratch.plan(
            self._wanted.folder, self._target, module=self._is_module, exclude=options.exclude, allow=options.allow
        )

    def _say_what_happens(self, runs: int, scratch: Scratch, *, has_kernel: bool) -> None:
        from sublight.fix.cure.run import LEAST_LIMIT_S, MOST_LIMIT_S, TIMES

        limit_s = self._wanted.fix_options.limit_s
        limit = f"at most {TIMES:g} times as long as the first run, {_time(LEAST_LIMIT_S)} to {_time(MOST_LIMIT_S)}"
        limit = f"{_time(limit_s)} at most" if limit_s else f"{limit} (--limit)"
        say(f"--fix runs {self._target} here as ever, once, then up to {runs} times more to try what would help:")
        for line in (
            f"where: each in a scratch copy of this folder ({units.text(scratch.total_bytes, 'B')}) under "
            f"{tempfile.gettempdir()}, which is then removed",
            "writes: what a trial would write elsewhere is refused"
            + ("" if has_kernel else ", but for compiled code, which this kernel cannot hold back"),
            f"time: a trial ends after some of its first steps, {limit}",
        ):
            print(f"  {line}", file=sys.stderr, flush=True)

    def make(self, explanation: Explanation, rebased: Callable[[float], Explanation]) -> Fixed:
        """Try the cures of the explanation's findings."""
        from sublight.diagnose import cures
        from sublight.fix.cure.record import Fixed
        from sublight.fix.cure.run import Rerun, limit_after

        try:
            scratch = self._planned()  # the first run may have left much in the folder
        except BadInput as error:
            return Fixed(before_s=None, figures_of="", tried=(), left=(), diff="", notes=(f"not tried: {error}",))
        limit_s = self._wanted.fix_options.limit_s or limit_after(time.monotonic() - self._began_s)
        script = Rerun(target=self._target, args=self._args, module=self._is_module, scratch=scratch, limit_s=limit_s)
        return cures.fix(explanation, script, say=say, rebased=rebased)


def _time(seconds: float) -> str:
    """A time in the words people use.

    >>> _time(90), _time(120), _time(3600)
    ('90 s', '2 min', '1 h')
    """
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"
