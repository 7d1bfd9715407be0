"""Capture a run: `run_script` runs a user's script unmodified, `profile` a block of code; both find the steps, time a
few without the profiler and profile a few more. `step` and `range` are for code that wants to say where things are.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from sublight.errors import BadInput
from sublight.trace.capture.folder import Folder
from sublight.trace.capture.interrupt import Interrupts, in_a_child
from sublight.trace.capture.reason import Start, reason
from sublight.trace.capture.settings import set_up_profiler

if TYPE_CHECKING:
    from sublight.trace.capture.phases import Recorder
    from sublight.trace.record import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a run gave, and how it ended."""

    trace: Trace | None  # None: there is nothing to explain, and `reason` says why
    folder: Folder  # the caller's to remove
    reason: str = ""
    exit_code: int = 0
    error: BaseException | None = None
    interrupted: bool = False
    steps_from: str = ""
    notes: tuple[str, ...] = ()
    kept: tuple[Any, ...] = ()  # of the script, for as long as Python keeps it: its module, its process groups

    @property
    def trace_file(self) -> Path:
        return self.folder.trace


class _Current:
    """The capture under way: `step()` has nothing else to find it by."""

    recorder: Recorder | None = None
    minds_forks = False


def run_script(
    target: str,
    args: Sequence[str],
    *,
    module: bool = False,
    warmup: int = 3,
    timed: int = 5,
    profiled: int = 3,
    stacks: bool = True,
    time_limit_s: float = 60.0,
    say: Callable[[str], None],
    show: Callable[[str], None] = lambda line: None,
    folder: Folder | None = None,
    interrupts: Interrupts | None = None,
    at_os_exit: Callable[[Captured], None] = lambda captured: None,
) -> Captured:
    """Run a script (or with `module` a module) to its end and capture some of its steps on the way.

    `folder` is for the recording, a new one unless given, and the caller's to remove. `interrupts` answers signals once
    the script has ended. A script that ends by `os._exit` does not come back: `at_os_exit` gets what it gave.
    """
    from sublight.trace.capture import script as capture_script

    checked = capture_script.check(target, args, module=module)
    set_up_profiler()
    from sublight.trace.capture.device import has_gpu
    from sublight.trace.capture.options import CaptureOptions

    options = CaptureOptions(warmup=warmup, timed=timed, profiled=profiled, stacks=stacks, time_limit_s=time_limit_s)
    process, start, stages = os.getpid(), Start(), interrupts or Interrupts()
    folder = folder or Folder.make()

    def leave(status: int) -> None:
        if threading.current_thread() is not threading.main_thread():  # the profiler is not this thread's to stop
            folder.remove()
            say("no report: the script ended by os._exit on another thread than the main one")
            return
        stages.hold()
        recorder.finish()
        at_os_exit(_captured(recorder, start, exit_code=status, error=SystemExit(status), interrupted=False))

    with _capturing(
        options,
        folder=folder,
        command=checked.command,
        script=checked.file,
        say=say,
        show=show,
        wait=checked.minds_cuda and has_gpu(),
    ) as recorder:
        with capture_script.watching_exit(leave):
            ended = capture_script.run(checked, stages)
        if os.getpid() != process:  # a child that the script forked came out at its end: it has nothing to report
            _end_child(ended.exit_code)
    try:
        found = _captured(recorder, start, exit_code=ended.exit_code, error=ended.error, interrupted=ended.interrupted)
        return replace(found, kept=(ended.module, *recorder.kept))
    finally:
        if interrupts is None:
            stages.put_back()


class Profile:
    """What `with sublight.profile() as p:` gives: `p.trace` and `p.captured` once the block has ended."""

    def __init__(self, **options: Any) -> None:
        from sublight.trace.capture.options import CaptureOptions

        try:
            self._options = CaptureOptions(**options)
        except TypeError as error:
            raise BadInput(f"{str(error).split('__init__() ')[-1]}: see `sublight.profile`") from None
        self.trace: Trace | None = None
        self.captured: Captured | None = None
        self._stack = contextlib.ExitStack()
        self._recorder: Recorder | None = None
        self._start = Start()

    def __enter__(self) -> Profile:
        self._start = Start()
        about: dict[str, Any] = {"command": "this block", "script": "", "say": lambda line: None, "wait": False}
        self._recorder = self._stack.enter_context(_capturing(self._options, folder=Folder.make(), **about))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What the block raised goes on to the caller, after what was seen is kept."""
        assert self._recorder is not None
        interrupted = isinstance(error, KeyboardInterrupt)
        try:
            self._stack.close()
            self.captured = _captured(
                self._recorder, self._start, exit_code=int(error is not None), error=error, interrupted=interrupted
            )
            self.trace = self.captured.trace
        finally:
            self._recorder.recording.folder.remove()


def profile(**options: Any) -> Profile:
    """Profile a block; `step()` calls in it mark the steps, else its optimizer's steps or its model's calls do.

    Options: `warmup`, `timed` and `profiled` steps (3, 5, 3), `stacks` (source lines), `time_limit_s`. A block of fewer
    steps is profiled from its start.
    """
    return Profile(**options)


def step() -> None:
    """One step ends here and the next begins; nothing happens where nothing captures."""
    if _Current.recorder is not None:
        _Current.recorder.finder.saw("explicit", 0)


class Range(contextlib.ContextDecorator):
    """A named region, as `with` or as a decorator."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._open: list[tuple[Any, bool]] = []  # of the calls that are inside it: it may be entered again

    def _recreate_cm(self) -> Range:
        return Range(self.name)  # a decorated function may run on several threads at once

    def __enter__(self) -> Range:
        torch = sys.modules.get("torch")
        if torch is None or torch.compiler.is_compiling():
            self._open.append((None, False))
            return self
        recorded = torch.profiler.record_function(self.name)
        recorded.__enter__()
        on_gpu = torch.cuda.is_initialized()
        if on_gpu:
            torch.cuda.nvtx.range_push(self.name)
        self._open.append((recorded, on_gpu))
        return self

    def __exit__(self, *error: Any) -> None:
        recorded, on_gpu = self._open.pop()
        if on_gpu:
            sys.modules["torch"].cuda.nvtx.range_pop()
        if recorded is not None:
            recorded.__exit__(*error)


def range(name: str) -> Range:
    """Name a region for PyTorch's profiler and, on a GPU, for Nsight: `with sublight.range("attention"):`."""
    return Range(name)


@contextlib.contextmanager
def _capturing(options: Any, *, folder: Folder, **about: Any) -> Iterator[Recorder]:
    from sublight.trace.capture.phases import Recorder

    if _Current.recorder is not None:
        folder.remove()
        raise BadInput("a capture is already under way: profile blocks do not nest")
    set_up_profiler()
    recorder = Recorder(options, folder=folder, **about)
    _mind_forks()
    _Current.recorder = recorder
    try:
        recorder.start()
        yield recorder
    finally:
        _Current.recorder = None
        recorder.finish()


def _mind_forks() -> None:
    if not _Current.minds_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)
        _Current.minds_forks = True


def _forget() -> None:
    if _Current.recorder is not None:
        from sublight.trace.capture.guard import forget_profilers

        forget_profilers()
        in_a_child()
        _Current.recorder.abandon()
        _Current.recorder = None


def _end_child(status: int) -> NoReturn:
    """As Python ends it, but for C++'s destructors: the profiler's waits for a thread that stayed with the parent."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


def _captured(
    recorder: Recorder, start: Start, *, exit_code: int, error: BaseException | None, interrupted: bool
) -> Captured:
    from sublight.trace.read import chrome

    trace, recording = None, recorder.recording
    if recording.written:
        with contextlib.suppress(BadInput):  # no event is in it
            trace = chrome.load(recording.folder.trace)
    why = reason(
        start=start,
        steps_from=recording.steps_from,
        threads=recorder.finder.other_threads,
        has_ops=trace is not None,
        error=error,
        interrupted=interrupted,
    )
    notes = tuple(recording.notes)
    if why and trace is None and notes:  # what kept the profiler from it says more
        why, notes = "; ".join(notes), ()
    return Captured(
        trace=None if why else trace,
        folder=recording.folder,
        reason=why,
        exit_code=exit_code,
        error=error,
        interrupted=interrupted,
        steps_from=recording.steps_from,
        notes=notes,
    )
