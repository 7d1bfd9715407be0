"""Run a program under a profiler: it keeps its arguments, its `__main__`, its output, its exit, and its children."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time  # as they are now: a program may put its own in their place

from sublight.errors import BadInput
from sublight.pyprof import children, recorder
from sublight.pyprof.record import PythonProfile
from sublight.pyprof.recorder import Options, Recorder
from sublight.trace.capture import script
from sublight.trace.capture.interrupt import Interrupts


@dataclass(slots=True)
class _Run:
    """One run, until `finish`: whatever ends it first."""

    target: script.Target
    options: Options
    folder: Path
    own: Recorder
    following: children.Following
    began_s: float = 0.0
    began_cpu_s: float = 0.0
    is_over: bool = False

    def finish(self, exit_code: int, *notes: str) -> PythonProfile:
        self.is_over = True
        wall_s, cpu_s = perf_counter() - self.began_s, process_time() - self.began_cpu_s
        self.following.end()
        process = children.compact(self.own.stop())
        others, missing = children.gather(self.folder)
        return PythonProfile(
            mode=self.options.mode,
            command=f"python {self.target.command}",
            python=platform.python_version(),
            hz=self.options.hz if self.options.mode == "sample" else 0.0,
            wall_s=wall_s,
            cpu_s=cpu_s,
            exit_code=exit_code,
            processes=(replace(process, command=f"python {self.target.command}"), *others),
            notes=(*notes, *missing),
        )


def run(
    target: script.Target,
    options: Options,
    *,
    report: Callable[[PythonProfile], None],
    say: Callable[[str], None],
    interrupts: Interrupts,
) -> int:
    """The program's exit status; `report` gets the profile, in this process alone, when the program has ended."""
    own = recorder.make(options, program=target.files, say=say)
    folder = Path(tempfile.mkdtemp(prefix="sublight-pyprof-"))
    following = children.Following(options, folder, own)
    one, process = _Run(target, options, folder, own, following), os.getpid()

    deepest = sys.getrecursionlimit()

    def end(exit_code: int, *notes: str) -> None:
        sys.setrecursionlimit(max(deepest, sys.getrecursionlimit()))  # the program may have lowered it
        try:
            report(one.finish(exit_code, *notes))
        except BadInput:  # a file that cannot be written is the user's to mend
            raise
        except Exception as error:  # the program may have left anything broken: a file, memory, `json.dumps`
            say(f"no report: {type(error).__name__}: {error}")
        finally:
            with contextlib.suppress(Exception):
                children.remove(folder)

    def leave(words: str, exit_code: int = 0) -> None:
        """The program ends without coming back: the report is made before."""
        if not one.is_over:
            say(words)
            end(exit_code, words)

    def leave_by_exit(status: int) -> None:
        leave("the program ends by os._exit: what it would have done at its exit is not done", status)

    def leave_by_exec(name: str) -> None:
        leave(f"the program becomes {name} by exec: the profile ends here")

    with script.watching_exit(leave_by_exit, first=own.hold), children.watching_exec(leave_by_exec):
        one.began_s, one.began_cpu_s = perf_counter(), process_time()
        following.begin()
        own.start()
        ended = script.run(target, interrupts)
        if os.getpid() != process:  # a child that the program forked, and that came here by itself: it ends as it would
            if children.Following.current is not None:
                children.Following.current.write()
            return ended.exit_code
        if one.is_over:  # it was to become another program, and could not
            return ended.exit_code
    end(ended.exit_code, *(["interrupted"] if ended.interrupted else []))
    return ended.exit_code
