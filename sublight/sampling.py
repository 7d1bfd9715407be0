"""Where Python is: a thread of ours looks at the stacks of all others so many times a second.

A look costs some tens of microseconds, whatever the program does between two of them. It needs the interpreter's lock,
so it may come late, by up to `sys.getswitchinterval()` (5 ms), and then sees what runs by then: `switch_s` shortens
that. Each sample counts for the time since the last look, not for one. A thread's own CPU clock tells
whether it ran meanwhile or waited (slept, waited for a lock, for the device or for the interpreter).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

DEEPEST = 200  # frames of a stack that are kept, from the inside
MOST_ROWS = 200_000  # after that only every other look is made, then every fourth, …
MOST_STACKS = 50_000  # distinct ones; a program that has more is sampled on, and those count as MANY
WAITS = 0.1  # a thread that ran for less than this share of the time since the last look has waited
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Frame:
    """One level of a stack: a function, and the line in it that ran."""

    file: str
    function: str
    line: int
    first_line: int = 0  # where the function begins


MANY = Frame("", "many different stacks", 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One thread at one look."""

    time_ns: int  # since 1970
    thread: int  # into Samples.threads
    stack: int  # into Samples.stacks
    wall_ns: int  # since the last look
    cpu_ns: int  # that the thread ran since the last look; UNKNOWN where the system does not tell
    label: int = 0  # into Samples.labels
    gil_ns: int = UNKNOWN  # that it waited for the interpreter's lock, of what it did not run
    core_ns: int = UNKNOWN  # that it was ready to run, and had no core

    @property
    def waited(self) -> bool:
        """Whether the thread did next to nothing since the last look."""
        return self.cpu_ns != UNKNOWN and self.cpu_ns < WAITS * self.wall_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What a sampler saw; stacks are shared, outermost frame first."""

    frames: tuple[Frame, ...] = ()
    stacks: tuple[tuple[int, ...], ...] = ()  # into frames
    threads: tuple[str, ...] = ()  # the main thread is the first
    labels: tuple[str, ...] = ()  # what was going on: set by `Sampler.label`
    rows: tuple[Row, ...] = ()
    look_s: float = 0.0  # that the looks took, all together

    def of(self, *labels: str, thread: int | None = None) -> Iterator[Row]:
        """The rows with one of these labels (any, where none is named), of one thread or of all."""
        for row in self.rows:
            if (not labels or self.labels[row.label] in labels) and (thread is None or row.thread == thread):
                yield row

    def stack(self, row: Row) -> tuple[Frame, ...]:
        return tuple(self.frames[number] for number in self.stacks[row.stack])

    def to_json(self) -> dict[str, Any]:
        return {
            "frames": [[frame.file, frame.function, frame.line, frame.first_line] for frame in self.frames],
            "stacks": [list(stack) for stack in self.stacks],
            "threads": list(self.threads),
            "labels": list(self.labels),
            "rows": [_numbers(row) for row in self.rows],
            "look_s": self.look_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Samples:
        """Read samples from JSON; ValueError where they are none, or hold an index that is out of range."""
        try:
            frames = [Frame(str(file), str(name), int(line), int(at)) for file, name, line, at in data["frames"]]
            samples = cls(
                frames=tuple(frames),
                stacks=tuple(tuple(int(number) for number in stack) for stack in data["stacks"]),
                threads=tuple(str(name) for name in data["threads"]),
                labels=tuple(str(name) for name in data["labels"]),
                rows=tuple(Row(*(int(number) for number in row)) for row in data["rows"]),
                look_s=float(data["look_s"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise ValueError("these are no samples") from None
        _point_into(samples.frames, (number for stack in samples.stacks for number in stack))
        _point_into(samples.stacks, (row.stack for row in samples.rows))
        _point_into(samples.threads, (row.thread for row in samples.rows))
        _point_into(samples.labels, (row.label for row in samples.rows))
        return samples


def _numbers(row: Row) -> list[int]:
    known = [row.gil_ns, row.core_ns] if (row.gil_ns, row.core_ns) != (UNKNOWN, UNKNOWN) else []
    return [row.time_ns, row.thread, row.stack, row.wall_ns, row.cpu_ns, row.label, *known]


def _point_into(things: tuple[Any, ...], numbers: Iterable[int]) -> None:
    if not all(0 <= number < len(things) for number in numbers):
        raise ValueError("these are no samples: a number points outside")


@dataclass(slots=True)
class _Table:
    """Numbers distinct values in the order in which they first come."""

    numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, thing: Any) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))

    def things(self) -> tuple[Any, ...]:
        return tuple(self.numbers)


class Sampler:
    """Looks `hz` times a second from `start` to `stop`; both may be called again, and what was seen adds up.

    >>> sampler = Sampler(hz=200)
    >>> sampler.start()
    >>> total = sum(range(2_000_000))
    >>> samples = sampler.stop()
    >>> samples.threads[0]
    'MainThread'
    """

    def __init__(self, *, hz: float = 100.0) -> None:
        self.hz = hz
        self.switch_s = 0.0  # how long Python may keep the lock from us, while we look; 0 leaves that as it is
        self._switch_before_s = self._switch_set_s = 0.0
        self.label = ""
        self._lock = threading.Lock()  # held from start to stop; the sampler's thread sleeps by waiting for it
        self._thread: threading.Thread | None = None
        self._frames, self._stacks, self._labels = _Table(), _Table(), _Table()
        self._threads: dict[int, int] = {}  # by ident
        self._names: list[str] = []
        self._known: dict[tuple[int, ...], int] = {}  # code and instruction of each frame -> the stack's number
        self._kept: dict[int, Any] = {}  # code objects of `_known`, alive: a freed one's address could be reused
        self._clocks: dict[int, tuple[int, int]] = {}  # a thread's ident -> its CPU clock and the last reading
        self._rows: list[tuple[int, ...]] = []  # a Row costs ten times what a tuple does: they are made at the end
        self._last_ns = 0
        self._look_ns = 0
        self._every, self._turn = 1, 0
        main = threading.main_thread()
        if main.ident is not None:
            self._thread_number(main.ident)

    @property
    def runs(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        if self._thread is not None:
            return
        self._lock.acquire()
        self._last_ns, self._clocks = time.perf_counter_ns(), {}
        if self.switch_s:
            self._switch_before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(self.switch_s, self._switch_before_s))
            self._switch_set_s = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._run, daemon=True, name="sublight sampler")
        self._thread.start()

    def stop(self) -> Samples:
        """Stop; returns all samples since the first start."""
        thread, self._thread = self._thread, None
        self._switch_as_before()
        if thread is not None:
            self._lock.release()
            thread.join()
        return self.samples()

    def abandon(self) -> None:
        """In a forked child: the thread stayed with the parent."""
        self._thread, self._lock = None, threading.Lock()
        self._switch_as_before()

    def _switch_as_before(self) -> None:
        """Restore Python's switch interval, unless the program has set another meanwhile."""
        if self._switch_before_s and sys.getswitchinterval() == self._switch_set_s:
            sys.setswitchinterval(self._switch_before_s)
        self._switch_before_s = 0.0

    def samples(self) -> Samples:
        return Samples(
            frames=self._frames.things(),
            stacks=self._stacks.things(),
            threads=tuple(self._names),
            labels=self._labels.things(),
            rows=tuple(Row(*numbers) for numbers in self._rows),
            look_s=self._look_ns * 1e-9,
        )

    def _run(self) -> None:
        own, lock = threading.get_ident(), self._lock
        due_s = time.perf_counter()
        while True:
            period_s = 1.0 / max(self.hz, 1e-3)
            due_s = max(due_s + period_s, time.perf_counter())  # a look that came late is not made up for
            if lock.acquire(timeout=max(due_s - time.perf_counter(), 0.0)):
                lock.release()
                return
            self._turn += 1
            if self._turn % self._every == 0:
                self._look(own)

    def _look(self, own: int) -> None:
        now_ns = time.perf_counter_ns()
        wall_ns, self._last_ns = now_ns - self._last_ns, now_ns
        time_ns, label = time.time_ns(), self._labels.number(self.label)
        for ident, frame in sys._current_frames().items():
            if ident != own:
                number = self._thread_number(ident)
                self._rows.append((time_ns, number, self._stack_number(frame), wall_ns, self._cpu_ns(ident), label))
        if len(self._rows) > MOST_ROWS * self._every:
            self._every *= 2
        self._look_ns += time.perf_counter_ns() - now_ns

    def _thread_number(self, ident: int) -> int:
        number = self._threads.get(ident)
        if number is None:
            thread = threading._active.get(ident)  # type: ignore[attr-defined]
            number = self._threads[ident] = len(self._names)
            self._names.append(thread.name if thread is not None else f"thread {ident}")
        return number

    def _stack_number(self, frame: FrameType) -> int:
        key: list[int] = []
        at: FrameType | None = frame
        while at is not None and len(key) < 2 * DEEPEST:
            key.append(id(at.f_code))
            key.append(at.f_lasti)
            at = at.f_back
        number = self._known.get(instructions := tuple(key))
        if number is None and len(self._known) >= MOST_STACKS:
            return self._stacks.number((self._frames.number(MANY),))
        if number is None:
            number = self._known[instructions] = self._stacks.number(self._resolve(frame))
        return number

    def _resolve(self, frame: FrameType) -> tuple[int, ...]:
        numbers: list[int] = []
        at: FrameType | None = frame
        while at is not None and len(numbers) < DEEPEST:
            code = at.f_code
            self._kept[id(code)] = code
            numbers.append(
                self._frames.number(
                    Frame(
                        code.co_filename,
                        code.co_qualname,
                        at.f_lineno or line_before(code, at.f_lasti),
                        code.co_firstlineno,
                    )
                )
            )
            at = at.f_back
        return tuple(reversed(numbers))

    def _cpu_ns(self, ident: int) -> int:
        try:
            clock, before_ns = self._clocks.get(ident) or (time.pthread_getcpuclockid(ident), UNKNOWN)
            now_ns = time.clock_gettime_ns(clock)
        except (AttributeError, OSError):  # this system has no such clock, or the thread has just ended
            self._clocks.pop(ident, None)
            return UNKNOWN
        self._clocks[ident] = (clock, now_ns)
        return now_ns - before_ns if before_ns != UNKNOWN else UNKNOWN


def line_before(code: CodeType, instruction: int) -> int:
    """The line of the last instruction that has one: a jump back to a loop's head has none of its own."""
    lines = [line for start, _, line in code.co_lines() if line is not None and start <= instruction]
    return lines[-1] if lines else code.co_firstlineno
