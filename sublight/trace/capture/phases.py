"""The phases of a capture, driven by the boundaries between steps.

    finding   the profiler runs from the start, in case no step ever comes; two boundaries end it
    warmup    nothing runs: caches, allocator and compiler settle
    timed     nothing but a clock at each boundary and a sampler of Python's stacks: how long a step really takes
    profiled  the profiler, a range around each step, and the sampler
    sources   one more step, marked with the user's lines and modules
    more      very fast steps are timed again, until there are enough for a figure that holds
    sampled   and their stacks are looked at more often, until there are enough to tell where Python is
    done      the script runs on at full speed

The device is waited for at the ends of the timed and the profiled window and nowhere else, so that a step overlaps the
next as it does without us. A script that ends early gives what the furthest phase saw. A signal waits while the
recorder works: no phase is cut in the middle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from sublight.trace.capture.announce import MARKED, PROFILED, Announcer, compiling_note
from sublight.trace.capture.device import (
    cuda_available,
    cuda_ready,
    in_graph_capture,
    open_range,
    synchronize,
    when_cuda_starts,
)
from sublight.trace.capture.file import Counters
from sublight.trace.capture.folder import Folder
from sublight.trace.capture.guard import ProcessGroups, Watch
from sublight.trace.capture.interrupt import Shield
from sublight.trace.capture.options import CaptureOptions
from sublight.trace.capture.profiler import Profiler
from sublight.trace.capture.recording import Recording, candidate_name
from sublight.trace.capture.source import SourceTracer, attribute
from sublight.trace.capture.stacks import MORE_HZ, StackLooks
from sublight.trace.capture.steps import STEPS_FROM, Kind, StepFinder
from sublight.trace.capture.ticks import SLOW_STEP_S, Ticks, are_enough

Phase = Literal["finding", "warmup", "timed", "profiled", "sources", "more", "sampled", "pause", "done"]
NO_OPTIMIZER_STEP = "an optimizer exists, and did not step while steps were looked for"
SAMPLED_S = 2.0  # of plain steps: with more than this, the first rate of looks has seen enough,
MORE_S = 0.6  # else so much is looked at with the second


class Recorder:
    """One capture, from `start` to `finish`; what it learned is in `recording`, and in the file that that writes."""

    def __init__(
        self,
        options: CaptureOptions,
        *,
        folder: Folder,
        command: str,
        script: str = "",
        say: Callable[[str], None],
        show: Callable[[str], None] = lambda line: None,
        wait: bool,
    ) -> None:
        self.phase: Phase = "finding"
        self.recording = Recording(folder=folder, command=command, script=script)
        self.finder = StepFinder(self)
        self._options = options
        self._wait = wait  # the first profile begins when CUDA or a module does, not at once
        self._announcer = Announcer(say, show)
        self._shield, self._thread = Shield(), threading.get_ident()
        self._profiler = Profiler(folder, notes=self.recording.notes, give_way=self._yield_to_script)
        self._groups = ProcessGroups()
        self._tracer = SourceTracer(script=script)
        self._looks = StackLooks(self.recording, wanted=options.stacks)
        self._watch: Watch | None = None
        self._range: Any = None
        self._ranges: dict[Kind, Any] = {}  # open ones of the finding
        self._left = 0
        self._began_s = time.monotonic()
        self._watched = 0  # steps since the windows began
        self._just_stopped = False
        self._after_pause: Callable[[], None] = self._begin_profiled
        self._ticks = Ticks()

    @property
    def kept(self) -> list[Any]:
        """What must not end before the report is out."""
        return self._groups.kept

    def start(self) -> None:
        with self._shield:
            self.recording.start, self._began_s = Counters.now(), time.monotonic()
            self._profiler.install()
            self._groups.install()
            self.finder.install()
            self._looks.begin("finding")
            if not self._wait or cuda_ready():
                self._start_first(cuda=cuda_available())
            else:
                when_cuda_starts(self._cuda_started)

    def finish(self) -> None:
        """The script ended, was interrupted, or failed."""
        with self._shield:
            self.finder.remove()
            self._groups.remove()
            self._profiler.remove()
            self._give_way()
            compile_s = Counters.now().compile_s - self.recording.start.compile_s
            self.recording.notes += compiling_note(compile_s, time.monotonic() - self._began_s)
            self._write()

    def abandon(self) -> None:
        """Called in a forked child: the parent captures, the child must not."""
        self.finder.stop()
        self._profiler.forget()
        self._looks.abandon()
        self.phase, self.recording.written = "done", True

    # what the finder tells

    def candidate(self, kind: Kind) -> None:
        if self.phase != "finding" or self._shield.is_up:
            return
        with self._shield:
            if not self._profiler.runs and self.recording.first is None:
                self._start_first(cuda=cuda_ready())
            if not self._profiler.runs:  # its time was up
                return
            if (opened := self._ranges.pop(kind, None)) is not None:
                opened.__exit__(None, None, None)
            number = self.recording.counts[kind] = self.recording.counts.get(kind, 0) + 1
            self._ranges[kind] = open_range(candidate_name(kind, number))

    def settled(self, kind: Kind) -> None:
        with self._shield:
            self._looks.end()
            self._stop_first()
            self.recording.steps_from, self.recording.kind = STEPS_FROM[kind], kind
            late = f"{NO_OPTIMIZER_STEP}: a step here is one call of the outermost module"
            self.recording.notes = [note for note in self.recording.notes if note != late]
            self.recording.notes += [late] if self.finder.awaits_optimizer else []
            self.phase, self._left = "warmup", self._options.warmup
            self._announcer.boundary()
            if not self._left:
                self._begin_timed()

    def boundary(self) -> None:
        # a step that is being captured into a graph does not run, and must not be waited for
        if self._shield.is_up or in_graph_capture():
            return
        self._watched += 1
        if self.phase in ("timed", "more", "sampled") and not self._tick():
            return
        with self._shield:
            self._advance()

    def _advance(self) -> None:
        self._just_stopped = False
        if self.phase == "pause":
            self._after_pause()
        elif self.phase == "warmup":
            self._announcer.boundary()
            self._left -= 1
            if self._left <= 0:
                self._begin_timed()
        elif self.phase == "timed":
            self._end_timed()
            self._begin_profiled()
        elif self.phase == "profiled":
            self._end_step()
        elif self.phase == "sources":
            self._end_sources()
        elif self.phase == "more":
            self._end_timed()
            self._begin_sampled()
        elif self.phase == "sampled":
            self._end_ticks()
            self._end_capture()

    # the finding

    def _start_first(self, *, cuda: bool) -> None:
        if self._profiler.start(cuda=cuda, memory=False):
            self._watch = Watch(self._expire, limit_s=self._options.time_limit_s)

    def _stop_first(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self.phase != "finding" or not self._profiler.runs:
            return
        for opened in reversed(self._ranges.values()):
            opened.__exit__(None, None, None)
        self._ranges = {}
        self.recording.first = self._stop_profiler("first")

    def _expire(self) -> None:
        """The search took too long, or filled too much memory: keep what there is, and go on looking."""
        if self.phase != "finding" or not self._profiler.runs or self._shield.is_up or in_graph_capture():
            return
        with self._shield:
            began_s = self._watch.began_s if self._watch is not None else time.monotonic()
            self._looks.end()
            self._stop_first()
            self.recording.first_note = f"only the first {time.monotonic() - began_s:.0f} s of the run were profiled"

    def _cuda_started(self) -> None:
        if self.phase == "finding" and not self._profiler.runs and self.recording.first is None:
            with self._shield:
                self._start_first(cuda=True)

    # the windows

    def _begin_timed(self) -> None:
        self.finder.freeze()
        self._watched = 0
        options = self._options
        self._announcer.begin(
            self.recording.steps_from, timed=options.timed, profiled=options.profiled, marked=int(options.stacks)
        )
        self.recording.begin = Counters.now()
        if options.timed <= 0:
            self._unless_just_stopped(self._begin_profiled)
            return
        self.phase = "timed"
        synchronize()
        self._looks.begin("timed")
        self._tick()

    def _tick(self) -> bool:
        """Whether the window is full."""
        ticks = self._ticks
        ticks.tick()
        if self.phase == "timed":
            return ticks.is_enough(self._options.timed)
        if self.phase == "sampled":
            return ticks.elapsed_s >= MORE_S
        return are_enough(self.recording.total_s + ticks.elapsed_s, len(self.recording.step_s) + ticks.steps)

    def _end_timed(self, *, cut_short: bool = False) -> None:
        """Between two waits for the device the wall clock is the truth; the marks only share it out among the steps.

        Without a device there is nothing to wait for: the last step ended at its tick, not when this line had its turn.
        """
        recording, ticks = self.recording, self._ticks
        until_s = ticks.times_s[-1]
        synchronize()
        if cuda_ready() and not cut_short:
            until_s = time.perf_counter()
        recording.total_s += until_s - ticks.times_s[0]
        recording.step_s += ticks.step_s()
        self._end_ticks()
        recording.timed = recording.timed or Counters.now()

    def _end_ticks(self) -> None:
        self._looks.count(self._ticks.steps)
        self._ticks = Ticks()
        self._looks.end()

    def _unless_just_stopped(self, begin: Callable[[], None]) -> None:
        """What PyTorch itself has open around this boundary belongs to the profiler that stopped, and must end before
        another starts: a step lies between them.
        """
        if self._just_stopped:
            self.phase, self._after_pause = "pause", begin
        else:
            begin()

    def _begin_profiled(self) -> None:
        slow = self.recording.total_s > SLOW_STEP_S * max(1, len(self.recording.step_s))
        self._left = 1 if slow else max(1, self._options.profiled)
        self._announcer.window("profiling", self._left, PROFILED)
        synchronize()
        if not self._profiler.start(cuda=cuda_ready(), memory=True):  # the script profiles itself
            self._end_capture()
            return
        self.phase = "profiled"
        self._looks.begin("profiled")
        self._range = open_range("ProfilerStep#1")

    def _end_step(self) -> None:
        self._range.__exit__(None, None, None)
        self._range = None
        self.recording.steps += 1
        self._left -= 1
        if self._left:
            self._range = open_range(f"ProfilerStep#{self.recording.steps + 1}")
            return
        self._end_window()
        self._unless_just_stopped(self._begin_sources) if self._options.stacks else self._begin_more()

    def _begin_sources(self) -> None:
        self._announcer.window("one step with its source lines", 1, MARKED)
        self.phase = "sources"
        if not self._profiler.start(cuda=False, memory=False, shapes=False):
            self._begin_more()
        elif not self._tracer.start():
            self._stop_profiler()
            self.recording.notes.append("no source lines: a debugger or a coverage tool traces this script")
            self._begin_more()

    def _end_window(self) -> None:
        synchronize()
        self.recording.sampled_steps["profiled"] = self.recording.steps
        self._looks.end()
        self.recording.window = self._stop_profiler("steps")
        self.recording.end = Counters.now()

    def _end_sources(self) -> None:
        self._tracer.stop()
        self.recording.notes += self._tracer.notes()
        if marked := self._stop_profiler("marked"):
            self.recording.sources = attribute(marked, self._tracer.places)
            marked.unlink()
        self._begin_more()

    def _begin_more(self) -> None:
        timed = self.recording
        if not timed.step_s or are_enough(timed.total_s, len(timed.step_s)):
            self._begin_sampled()
            return
        self.phase = "more"
        synchronize()
        self._looks.begin("timed")
        self._tick()

    def _begin_sampled(self) -> None:
        if not self._options.stacks or self.recording.total_s >= SAMPLED_S:
            self._end_capture()
            return
        self.phase = "sampled"
        self._looks.begin("sampled", hz=MORE_HZ)
        self._tick()

    def _end_capture(self) -> None:
        self.phase = "done"
        self.finder.stop()
        self._write()
        timed = self.recording
        if timed.steps:
            step_s = timed.total_s / len(timed.step_s) if timed.step_s else self._announcer.step_s
            self._announcer.done(timed.steps, timed.steps_from, watched=self._watched, step_s=step_s)

    def _yield_to_script(self) -> None:
        if self.phase != "done" and threading.get_ident() == self._thread:
            with self._shield:
                self.recording.notes.append(
                    "the script starts a profiler of its own, and two cannot run at once: ours stopped there"
                )
                self._give_way()

    def _give_way(self) -> None:
        """Stop where we are and keep what is whole."""
        self.finder.stop()
        self._looks.end()
        self._stop_first()
        phase, self.phase = self.phase, "done"
        if phase in ("timed", "more"):
            self._end_timed(cut_short=True)  # the last step is not whole: it ends where it began
        elif phase == "sampled":
            self._end_ticks()
        elif phase == "profiled":
            if self._range is not None:
                self._range.__exit__(None, None, None)
                self.recording.cut_short = True
            self._end_window()
        elif phase == "sources":
            self._tracer.stop()
            self._stop_profiler()
        if self._options.stacks and phase in ("warmup", "pause", "timed", "profiled", "sources"):
            self.recording.notes.append(
                "ops have no source lines: the script ended before a step could run with its lines marked, "
                "which comes after those that are timed and profiled"
            )

    # the profiler and the file

    def _stop_profiler(self, keep: str = "") -> Path | None:
        self._just_stopped = True
        self._announcer.pause("stopping the profiler, and writing what it saw")
        try:
            return self._profiler.stop(keep)
        finally:
            self._announcer.go_on()

    def _write(self) -> None:
        self._announcer.pause("writing what was recorded")
        try:
            self.recording.write()
        finally:
            self._announcer.go_on()
