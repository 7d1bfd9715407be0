"""The phases of a capture, driven by the boundaries between steps.

    finding   the profiler runs from the start, in case no step ever comes; two boundaries end it
    warmup    nothing runs: caches, allocator and compiler settle
    timed     nothing runs but a clock at each boundary: how long a step really takes
    profiled  the profiler, a range around each step
    sources   one more step, marked with the user's lines and modules
    more      very fast steps are timed again, until there are enough for a figure that holds
    done      the script runs on at full speed

The device is waited for at the ends of the timed and the profiled window and nowhere else, so that a step overlaps the
next as it does without us. A script that ends early gives what the furthest phase saw.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sublight.trace.capture.device import (
    cuda_available,
    cuda_ready,
    in_graph_capture,
    mark,
    open_range,
    synchronize,
    when_cuda_starts,
)
from sublight.trace.capture.file import Counters, dynamo_meta, machine, peak_memory_bytes, write
from sublight.trace.capture.graphs import ops_of_kernels, replays
from sublight.trace.capture.guard import Guard, OpenRanges, Watch
from sublight.trace.capture.source import Sources, SourceTracer, attribute
from sublight.trace.capture.steps import STEPS_FROM, STRENGTH, Kind, StepFinder

Phase = Literal["finding", "warmup", "timed", "profiled", "sources", "more", "pause", "done"]
WHOLE_RUN = "the whole run"
SHORT_WINDOW_S = 0.1  # very fast steps are timed until all windows together are this long,
MOST_TIMED = 50  # or there are this many
SLOW_STEP_S = 10.0  # a step this slow is timed twice and profiled once


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How many steps each phase takes."""

    warmup: int = 3
    timed: int = 5
    profiled: int = 3
    stacks: bool = True
    time_limit_s: float = 60.0  # of the search for steps


class Recorder:
    """One capture, from `start` to `finish`; what it learned is in the trace file and `notes`."""

    def __init__(
        self, options: Options, *, path: Path, command: str, script: str = "", say: Callable[[str], None], wait: bool
    ) -> None:
        self.phase: Phase = "finding"
        self.notes: list[str] = []
        self.steps_from = WHOLE_RUN
        self.written = False
        self.finder = StepFinder(self)
        self._options, self.path, self._command, self._say = options, path, command, say
        self._wait = wait  # the first profile begins when CUDA or a module does, not at once
        self._guard = Guard(self._yield_to_script)
        self._open_ranges = OpenRanges()
        self._tracer = SourceTracer(script=script)
        self._watch: Watch | None = None
        self._profiler: Any = None  # the one that runs
        self._first: Path | None = None  # what the finding's profiler saw
        self._first_note = ""
        self._window: Path | None = None  # what the profiled steps' saw
        self._range: Any = None
        self._ranges: dict[Kind, tuple[Any, int]] = {}  # open ones of the finding, and their number
        self._steps = 0  # profiled to their end
        self._left = 0
        self._just_stopped = False
        self._after_pause: Callable[[], None] = self._begin_profiled
        self._times_s: list[float] = []
        self._marks: list[Any] = []  # CUDA events at the same boundaries
        self._step_s: list[float] = []
        self._total_s = 0.0
        self._sources = Sources()
        self._start = Counters()
        self._begin: Counters | None = None  # of the measured windows
        self._timed: Counters | None = None  # after the first of them
        self._end: Counters | None = None

    def start(self) -> None:
        self._start = Counters.now()
        self._guard.install()
        self.finder.install()
        if not self._wait or cuda_ready():
            self._start_first(cuda=cuda_available())
        else:
            when_cuda_starts(self._cuda_started)

    def finish(self) -> None:
        """The script ended, was interrupted, or failed."""
        self.finder.remove()
        self._guard.remove()
        self._give_way()
        self._write()

    def abandon(self) -> None:
        """In a forked child: the parent captures, the child must not."""
        self.finder.stop()
        self._guard.remove()
        self.phase, self._profiler, self.written = "done", None, True

    # what the finder tells

    def candidate(self, kind: Kind) -> None:
        if self.phase != "finding":
            return
        if self._profiler is None and self._first is None:
            self._start_first(cuda=cuda_ready())
        if self._profiler is None:  # its time was up
            return
        opened, number = self._ranges.get(kind, (None, 0))
        if opened is not None:
            opened.__exit__(None, None, None)
        self._ranges[kind] = (open_range(_candidate_name(kind, number + 1)), number + 1)

    def settled(self, kind: Kind) -> None:
        self._stop_first()
        self.steps_from = STEPS_FROM[kind]
        self.phase, self._left = "warmup", self._options.warmup
        if not self._left:
            self._begin_timed()

    def boundary(self) -> None:
        if in_graph_capture():  # a step that is being captured does not run, and must not be waited for
            return
        self._just_stopped = False
        if self.phase == "pause":
            self._after_pause()
        elif self.phase == "warmup":
            self._left -= 1
            if self._left <= 0:
                self._begin_timed()
        elif self.phase in ("timed", "more"):
            self._tick()
        elif self.phase == "profiled":
            self._end_step()
        elif self.phase == "sources":
            self._end_sources()

    # the finding

    def _start_first(self, *, cuda: bool) -> None:
        self._start_profiler(cuda=cuda, memory=False)
        self._watch = Watch(self._expire, limit_s=self._options.time_limit_s)

    def _stop_first(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self.phase != "finding" or self._profiler is None:
            return
        for opened, _ in reversed(self._ranges.values()):
            opened.__exit__(None, None, None)
        self._first = self._stop_profiler("first")

    def _expire(self) -> None:
        """The search took too long, or filled too much memory: keep what there is, and go on looking."""
        if self.phase != "finding" or self._profiler is None or in_graph_capture():
            return
        began = self._watch.began_s if self._watch is not None else time.monotonic()
        self._stop_first()
        self._ranges = {}
        self._first_note = f"only the first {time.monotonic() - began:.0f} s of the run were profiled"

    def _cuda_started(self) -> None:
        if self.phase == "finding" and self._profiler is None and self._first is None:
            self._start_first(cuda=True)

    # the windows

    def _begin_timed(self) -> None:
        self.finder.freeze()
        self._begin = Counters.now()
        if self._options.timed <= 0:
            self._unless_just_stopped(self._begin_profiled)
            return
        self.phase = "timed"
        synchronize()
        self._tick()

    def _tick(self) -> None:
        self._times_s.append(time.perf_counter())
        if cuda_ready():
            self._marks.append(mark())
        steps, elapsed = len(self._times_s) - 1, self._times_s[-1] - self._times_s[0]
        if self.phase == "more":
            if self._total_s + elapsed >= SHORT_WINDOW_S or len(self._step_s) + steps >= MOST_TIMED:
                self._end_timed()
                self._end_capture()
        elif steps >= self._options.timed or (steps >= 2 and elapsed / steps > SLOW_STEP_S):
            self._end_timed()
            self._begin_profiled()

    def _end_timed(self, *, cut_short: bool = False) -> None:
        """Between two waits for the device the wall clock is the truth; the marks only share it out among the steps."""
        until_s = self._times_s[-1]
        synchronize()
        self._total_s += (until_s if cut_short else time.perf_counter()) - self._times_s[0]
        if len(self._marks) == len(self._times_s):
            self._step_s += [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self._marks)]
        else:
            self._step_s += [b - a for a, b in itertools.pairwise(self._times_s)]
        self._times_s, self._marks = [], []
        self._timed = self._timed or Counters.now()

    def _unless_just_stopped(self, begin: Callable[[], None]) -> None:
        """What PyTorch itself has open around this boundary belongs to the profiler that stopped, and must end before
        another starts: a step lies between them.
        """
        if self._just_stopped:
            self.phase, self._after_pause = "pause", begin
        else:
            begin()

    def _begin_profiled(self) -> None:
        slow = self._total_s > SLOW_STEP_S * max(1, len(self._step_s))
        self._left = 1 if slow else max(1, self._options.profiled)
        synchronize()
        try:
            self._start_profiler(cuda=cuda_ready(), memory=True)
        except RuntimeError as error:  # the script profiles itself
            self.notes.append(f"the profiler did not start: {str(error).splitlines()[0]}")
            self._end_capture()
            return
        self.phase = "profiled"
        self._range = open_range("ProfilerStep#1")

    def _end_step(self) -> None:
        self._range.__exit__(None, None, None)
        self._range = None
        self._steps += 1
        self._left -= 1
        if self._left:
            self._range = open_range(f"ProfilerStep#{self._steps + 1}")
            return
        self._end_window()
        self._unless_just_stopped(self._begin_sources) if self._options.stacks else self._begin_more()

    def _begin_sources(self) -> None:
        self.phase = "sources"
        self._start_profiler(cuda=False, memory=False, shapes=False)
        if not self._tracer.start():
            self._stop_profiler()
            self.notes.append("no source lines: a debugger or a coverage tool traces this script")
            self._begin_more()

    def _end_window(self) -> None:
        synchronize()
        self._window = self._stop_profiler("steps")
        self._end = Counters.now()

    def _end_sources(self) -> None:
        self._tracer.stop()
        if marked := self._stop_profiler("marked"):
            self._sources = attribute(marked, self._tracer.places)
            marked.unlink()
        self._begin_more()

    def _begin_more(self) -> None:
        if not self._step_s or self._total_s >= SHORT_WINDOW_S or len(self._step_s) >= MOST_TIMED:
            self._end_capture()
            return
        self.phase = "more"
        synchronize()
        self._tick()

    def _end_capture(self) -> None:
        self.phase = "done"
        self.finder.stop()
        self._write()
        if self._steps:
            self._say(
                f"captured {self._steps} step{'s' * (self._steps != 1)} ({self.steps_from}); "
                "the script goes on, Ctrl-C ends it with the report"
            )

    def _yield_to_script(self) -> None:
        if self.phase != "done":
            self.notes.append("the script starts a profiler of its own, and two cannot run at once: ours stopped there")
            self._give_way()

    def _give_way(self) -> None:
        """Stop where we are and keep what is whole."""
        self.finder.stop()
        self._stop_first()
        phase, self.phase = self.phase, "done"
        if phase in ("timed", "more"):
            self._end_timed(cut_short=True)  # the last step is not whole: it ends where it began
        elif phase == "profiled":
            if self._range is not None:
                self._range.__exit__(None, None, None)
            self._end_window()
        elif phase == "sources":
            self._tracer.stop()
            self._stop_profiler()

    # the profiler and the file

    def _start_profiler(self, *, cuda: bool, memory: bool, shapes: bool = True) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        profiler = profile(activities=activities, record_shapes=shapes, profile_memory=memory, acc_events=True)
        with self._guard.ours():
            profiler.start()
        self._open_ranges.begin()
        self._profiler = profiler

    def _stop_profiler(self, keep: str = "") -> Path | None:
        """Stop, and write what it saw at once: the next profiler takes the memory of the last."""
        profiler, self._profiler = self._profiler, None
        self._just_stopped = True
        self._open_ranges.end()
        try:
            with self._guard.ours():
                profiler.stop()
                if not keep:
                    return None
                raw = self.path.with_name(f"{self.path.stem}.{keep}.json")
                profiler.export_chrome_trace(str(raw))
                return raw
        except RuntimeError as error:
            self.notes.append(f"a profile was lost: {str(error).splitlines()[0]}")
            return None

    def _write(self) -> None:
        """Once: the profiled steps where one was whole, else what the finding saw."""
        if self.written:
            return
        if self._window is not None and self._steps:
            unfinished = {f"ProfilerStep#{self._steps + 1}": ""}
            meta = dict(self._meta())
            if self._first is not None and replays(self._window):
                meta["graph_kernels"] = ops_of_kernels(self._first)
            write(self._window, self.path, meta, rename=unfinished)
        elif self._first is not None:
            self._write_first(self._first)
        else:
            return
        self.written = True
        self._drop()

    def _drop(self) -> None:
        for raw in (self._first, self._window):
            if raw is not None:
                raw.unlink(missing_ok=True)
        self._first = self._window = None

    def _write_first(self, first: Path) -> None:
        self.notes += [self._first_note] if self._first_note else []
        whole = [kind for kind in STRENGTH if self._ranges.get(kind, (None, 0))[1] > 1]
        chosen = self.finder.kind if self.finder.kind in whole else next(iter(whole), None)
        rename = {
            _candidate_name(kind, number): ""
            for kind, (_, last) in self._ranges.items()
            for number in range(1, last + 1)
        }
        if chosen is None:
            self.steps_from = WHOLE_RUN
        else:
            self.steps_from = STEPS_FROM[chosen]
            count = self._ranges[chosen][1] - 1  # the last one is open to the end: no whole step
            rename |= {_candidate_name(chosen, number): f"ProfilerStep#{number}" for number in range(1, count + 1)}
            self.notes.append(
                f"no step after the warm-up could be profiled: the report shows the first "
                f"{'one' if count == 1 else count} that the profiler saw"
            )
        write(first, self.path, self._meta(), rename=rename)

    def _meta(self) -> Mapping[str, Any]:
        end = self._end or Counters.now()
        begin = self._begin or end
        timed = self._timed or begin
        return {
            "version": 1,
            "steps_from": self.steps_from,
            "unprofiled_step_s": self._step_s,
            "unprofiled_total_s": self._total_s,
            "unprofiled_steps": len(self._step_s),
            "command": self._command,
            **machine(),
            "sources": {name: getattr(self._sources, name) for name in ("ops", "index", "source", "module")},
            "peak_memory_bytes": peak_memory_bytes(),
            "allocator": {name: count - begin.allocator.get(name, 0) for name, count in timed.allocator.items()},
            "dynamo": dynamo_meta(self._start, begin, end),
            "notes": list(self.notes),
        }


def _candidate_name(kind: Kind, number: int) -> str:
    return f"sublight.{kind}#{number}"
