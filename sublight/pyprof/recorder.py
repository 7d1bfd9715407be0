"""What records in one process: looks by the C sampler or by `sublight.sampling`, calls by a tracer."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sublight import sampling
from sublight.pyprof import native
from sublight.pyprof.ours import BEHIND, ENTRIES, is_ours
from sublight.pyprof.record import Mode, PythonProcess
from sublight.pyprof.tracer import Tracer
from sublight.sampling import MANY, UNKNOWN, Frame, Row, Sampler, Samples, line_before

SWITCH_S = 0.0005  # that Python may keep its lock from a sampler in Python: a look that comes late sees a later line
DEEPEST = 1000  # frames that the C sampler keeps of a stack, from the inside (sampler.c)
DEEPER = Frame("", "cut: the frames outside of these", 0)
_BOOTSTRAP = ("Thread._bootstrap", "Thread._bootstrap_inner", "_run_code", "_run_module_code", "run_module")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a process is recorded; its children get the same."""

    mode: Mode = "sample"
    hz: float = 100.0
    builtins: bool = True  # calls of functions that are written in C are traced, too
    events: int = 100_000  # calls that are kept one by one, from the first; a child's: a tenth of it


class Recorder(Protocol):
    """Records from `start` to `stop`; around a fork `pause` and `resume`, and in the child `abandon`."""

    def start(self) -> None: ...
    def stop(self) -> PythonProcess: ...
    def hold(self) -> None: ...  # counts no call from here on; `stop` gives what was counted before
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abandon(self) -> None: ...


def make(
    options: Options, *, program: tuple[str, ...] = (), say: Callable[[str], None] = lambda line: None
) -> Recorder:
    """`program`: its files, where the recorder starts before it does."""
    module = native.module(say)
    if options.mode != "sample":
        timed = options.mode == "trace"
        return Tracer(module, timed=timed, builtins=options.builtins, events=options.events, program=program)
    return NativeLooks(module, options.hz) if module is not None else PythonLooks(options.hz)


def this_command() -> str:
    words = getattr(sys, "orig_argv", sys.argv)
    return " ".join(words[:1] and [os.path.basename(words[0]), *words[1:]])


class NativeLooks:
    """The C sampler."""

    def __init__(self, module: Any, hz: float) -> None:
        self._module, self._hz = module, hz

    def start(self) -> None:
        self._module.sample_start(float(self._hz), threading._active)  # type: ignore[attr-defined]

    def stop(self) -> PythonProcess:
        self._module.sample_stop()
        stacks, rows, threads, looks, look_ns = self._module.sample_seen()
        samples = _samples(stacks, rows, threads, look_s=look_ns * 1e-9)
        return PythonProcess(
            pid=os.getpid(),
            parent=os.getppid(),
            command=this_command(),
            samples=without_ours(samples),
            looks=looks,
            how="C sampler",
            knows_waits=any(row.gil_ns >= 0 for row in samples.rows),
        )

    def hold(self) -> None:
        """Frames of ours are left out of stacks as it is."""

    def pause(self) -> None:
        self._module.sample_pause()

    def resume(self) -> None:
        self._module.sample_resume()

    def abandon(self) -> None:
        self._module.sample_abandon()


def _samples(
    stacks: list[list[tuple[Any, int]]],
    rows: list[tuple[int, ...]],
    threads: list[tuple[str | None, int, int]],
    look_s: float,
) -> Samples:
    frames: dict[Frame, int] = {}

    def frame(code: Any, instruction: int) -> int:
        line = _line(code, instruction)
        one = Frame(code.co_filename, code.co_qualname, line, code.co_firstlineno)
        return frames.setdefault(one, len(frames))

    known: dict[tuple[int, int], int] = {}
    resolved = []
    for stack in stacks:
        numbers = []
        for code, instruction in reversed(stack):
            key = (id(code), instruction)
            if key not in known:
                known[key] = frame(code, instruction)
            numbers.append(known[key])
        resolved.append(tuple(numbers or [frames.setdefault(MANY, len(frames))]))
    names = tuple(name or f"thread {ident}" for name, ident, _ in threads)
    made = _rows(RawRow(*row) for row in rows)
    return Samples(
        frames=tuple(frames), stacks=tuple(resolved), threads=names, labels=("",), rows=tuple(made), look_s=look_s
    )


class RawRow(NamedTuple):
    """A thread at one look, as the C sampler gives it."""

    time_ns: int
    thread: int
    stack: int
    wall_ns: int
    cpu_ns: int
    core_ns: int
    look: int
    late_ns: int  # that the sampler itself waited for the interpreter's lock
    state: int  # what the thread did at the look


WAITED_FOR_LOCK, NOT_KNOWN = 1, -1  # states of the C sampler


def _rows(raw: Iterable[RawRow]) -> Iterator[Row]:
    """Who waits for the lock does so while others run, or while somebody keeps it asleep, so that the sampler waits,
    too: not for longer. Else a thread that slept, and is stopped by this very look, would have waited all the time.
    """
    for _, group in itertools.groupby(raw, key=lambda row: row.look):
        look = list(group)
        all_cpu_ns = sum(max(row.cpu_ns, 0) for row in look)
        for row in look:
            gil_ns = UNKNOWN if row.state == NOT_KNOWN else 0
            if row.state == WAITED_FOR_LOCK:
                rest_ns = row.wall_ns - row.cpu_ns - max(row.core_ns, 0)
                most_ns = all_cpu_ns - row.cpu_ns + max(row.late_ns - all_cpu_ns, 0)
                gil_ns = max(min(rest_ns, most_ns), 0)
            yield Row(row.time_ns, row.thread, row.stack, row.wall_ns, row.cpu_ns, 0, gil_ns, row.core_ns)


def _line(code: Any, instruction: int) -> int:
    if instruction < 0:
        return int(code.co_firstlineno)
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return int(line)
    return line_before(code, instruction)


class PythonLooks:
    """`sublight.sampling`: costs more, and knows of a thread only whether it ran."""

    def __init__(self, hz: float) -> None:
        self._sampler = Sampler(hz=hz)
        self._hz = hz

    def start(self) -> None:
        self._sampler.switch_s = SWITCH_S if threading.active_count() == 1 else 0.0
        self._sampler.start()

    def stop(self) -> PythonProcess:
        samples = self._sampler.stop()
        return PythonProcess(
            pid=os.getpid(),
            parent=os.getppid(),
            command=this_command(),
            samples=without_ours(samples, deepest=sampling.DEEPEST),
            looks=len({row.time_ns for row in samples.rows}),
            how=f"sampler in Python ({native.Native.reason}): a look costs more, and waits are not told apart",
        )

    def hold(self) -> None:
        """Frames of ours are left out of stacks as it is."""

    def pause(self) -> None:
        self._sampler.stop()

    def resume(self) -> None:
        self._sampler.start()

    def abandon(self) -> None:
        self._sampler.abandon()
        self._sampler = Sampler(hz=self._hz)


def without_ours(samples: Samples, *, deepest: int = DEEPEST) -> Samples:
    """Less the frames that called the program, and what a thread begins with; looks that saw nothing else go.

    A stack of as many frames as a look keeps may have had more: `DEEPER` stands for what called them."""
    cut = [_cut(tuple(samples.frames[number] for number in stack), stack) for stack in samples.stacks]
    deeper = len(samples.frames)
    cut = [
        (deeper, *left) if left and len(whole) >= deepest else left
        for whole, left in zip(samples.stacks, cut, strict=True)
    ]
    rows = tuple(row for row in samples.rows if cut[row.stack])
    return Samples(
        frames=(*samples.frames, DEEPER) if any(deeper in stack for stack in cut) else samples.frames,
        stacks=tuple(stack or (0,) for stack in cut) if samples.frames else (),
        threads=samples.threads,
        labels=samples.labels,
        rows=rows,
        look_s=samples.look_s,
    )


def _cut(frames: tuple[Frame, ...], stack: tuple[int, ...]) -> tuple[int, ...]:
    first = 0
    for at, frame in enumerate(frames):
        if frame.file in ENTRIES:
            first = at + 1
    while first < len(frames) and _is_bootstrap(frames[first]):
        first += 1
    last = len(frames)
    while last > first and is_ours(frames[last - 1].file):  # the recorder itself, as it stops
        last -= 1
    is_behind = first < len(frames) and frames[first].file == BEHIND
    is_ours_alone = is_behind or (not first and last < len(frames))  # before the program, or behind it
    return () if is_ours_alone else stack[first:last]


def _is_bootstrap(frame: Frame) -> bool:
    standard = frame.file.startswith("<frozen") or frame.file.endswith(("threading.py", "runpy.py"))
    return standard and frame.function in _BOOTSTRAP
