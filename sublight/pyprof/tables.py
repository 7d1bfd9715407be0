"""From looks or calls to figures: own and total time of functions and lines, by thread, and what of it was waiting.

A look's time is split: the thread ran (its own CPU clock), had no core, waited for the interpreter's lock, and else was
idle (asleep, waiting for a lock, a file or a device). Of the main thread all of it counts, since somebody waits for it;
of other threads idle time is kept apart, else threads that wait for work would fill every table.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from sublight.pyprof.record import PythonProcess, PythonProfile, ThreadCalls
from sublight.sampling import UNKNOWN, Frame, Row

PARTS = ("ran", "gil", "core", "idle")


@dataclass(slots=True)
class Split:
    """Seconds of threads, by what they did."""

    ran_s: float = 0.0
    gil_s: float = 0.0
    core_s: float = 0.0
    idle_s: float = 0.0

    def add(self, other: Split) -> None:
        self.ran_s += other.ran_s
        self.gil_s += other.gil_s
        self.core_s += other.core_s
        self.idle_s += other.idle_s

    @property
    def busy_s(self) -> float:
        return self.ran_s + self.gil_s + self.core_s

    @property
    def all_s(self) -> float:
        return self.busy_s + self.idle_s


def split(row: Row) -> Split:
    """What the thread did since its last look.

    >>> split(Row(0, 0, 0, wall_ns=10_000_000, cpu_ns=2_000_000, gil_ns=3_000_000, core_ns=1_000_000))
    Split(ran_s=0.002, gil_s=0.003, core_s=0.001, idle_s=0.004)
    """
    wall_ns = row.wall_ns
    if row.cpu_ns == UNKNOWN:
        return Split(ran_s=wall_ns * 1e-9)
    ran = min(row.cpu_ns, wall_ns)
    core = min(max(row.core_ns, 0), wall_ns - ran)
    gil = min(max(row.gil_ns, 0), wall_ns - ran - core)
    return Split(ran * 1e-9, gil * 1e-9, core * 1e-9, (wall_ns - ran - core - gil) / 1e9)


@dataclass(slots=True)
class Figure:
    """A function, or one line of it."""

    frame: Frame
    own: Split = field(default_factory=Split)
    own_s: float = 0.0  # that counts
    total_s: float = 0.0  # with what it called
    calls: int = 0
    resumes: int = 0
    threads: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lines: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def line(self) -> int:
        """The line that takes most of a function's own time; else its first line."""
        return max(self.lines, key=self.lines.__getitem__) if self.lines else self.frame.line


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """All figures of a profile."""

    functions: tuple[Figure, ...]  # by own time, most first
    lines: tuple[Figure, ...]
    threads: tuple[tuple[str, Split], ...]
    counted_s: float  # what all shares are of
    looks: int = 0
    calls: int = 0


def thread_label(profile: PythonProfile, process: PythonProcess, name: str) -> str:
    """Threads of children are named by their process, too."""
    return name if process is profile.processes[0] else f"{process.pid} {name}"


def counted_s(part: Split, *, is_main: bool) -> float:
    return part.all_s if is_main else part.busy_s


def weighed(profile: PythonProfile) -> Iterator[tuple[PythonProcess, int, tuple[Frame, ...], Split, float]]:
    """Looks by process, thread and stack: (process, thread, frames, what it did, what of it counts)."""
    for process in profile.processes:
        samples = process.samples
        if samples is None:
            continue
        sums: dict[tuple[int, int], Split] = {}
        for row in samples.rows:
            sums.setdefault((row.thread, row.stack), Split()).add(split(row))
        for (thread, stack), part in sums.items():
            frames = tuple(samples.frames[number] for number in samples.stacks[stack])
            is_main = process is profile.processes[0] and thread == 0
            yield process, thread, frames, part, counted_s(part, is_main=is_main)


def tables(profile: PythonProfile) -> Tables:
    return _of_looks(profile) if profile.mode == "sample" else _of_calls(profile)


def _of_looks(profile: PythonProfile) -> Tables:
    functions: dict[tuple[str, str, int], Figure] = {}
    lines: dict[tuple[str, int], Figure] = {}
    threads: dict[str, Split] = {}
    all_s = 0.0
    for process, thread, frames, part, weight_s in weighed(profile):
        assert process.samples is not None
        label = thread_label(profile, process, process.samples.threads[thread])
        threads.setdefault(label, Split()).add(part)
        all_s += weight_s
        seen: set[object] = set()
        for at, frame in enumerate(reversed(frames)):
            function = functions.setdefault((frame.file, frame.function, frame.first_line), Figure(frame))
            line = lines.setdefault((frame.file, frame.line), Figure(frame))
            for figure in (function, line):
                if at == 0:
                    figure.own.add(part)
                    figure.own_s += weight_s
                if id(figure) not in seen:  # a function that calls itself is counted once
                    seen.add(id(figure))
                    figure.total_s += weight_s
                    figure.threads[label] += weight_s
            if at == 0:
                function.lines[frame.line] += weight_s
    return Tables(
        functions=_ranked(functions.values()),
        lines=_ranked(lines.values()),
        threads=tuple(sorted(threads.items(), key=lambda one: -one[1].busy_s)),
        counted_s=all_s,
        looks=sum(process.looks for process in profile.processes),
    )


def _of_calls(profile: PythonProfile) -> Tables:
    functions: dict[tuple[str, str, int], Figure] = {}
    threads: dict[str, Split] = {}
    all_s, calls = 0.0, 0
    for process in profile.processes:
        if process.calls is None:
            continue
        for thread in process.calls.threads:
            label = thread_label(profile, process, thread.name)
            inner = [0] * len(thread.nodes)
            for node in thread.nodes[1:]:
                inner[node.parent] += node.total_ns
            outermost = _outermost(thread)
            whole = Split()
            for at, node in enumerate(thread.nodes[1:], 1):
                frame = process.calls.functions[node.function]
                figure = functions.setdefault((frame.file, frame.function, frame.line), Figure(frame))
                own_s = max(node.total_ns - inner[at], 0) * 1e-9
                figure.own_s += own_s
                figure.own.ran_s += own_s
                whole.ran_s += own_s
                figure.calls += node.calls
                figure.resumes += node.resumes
                figure.threads[label] += own_s
                calls += node.calls
                if outermost[at]:
                    figure.total_s += node.total_ns * 1e-9
            threads.setdefault(label, Split()).add(whole)
            all_s += whole.ran_s
    return Tables(
        functions=_ranked(functions.values()),
        lines=(),
        threads=tuple(sorted(threads.items(), key=lambda one: -one[1].all_s)),
        counted_s=all_s,
        calls=calls,
    )


def _outermost(thread: ThreadCalls) -> list[bool]:
    """Whether no node above a node is of the same function: only such nodes add to the function's total."""
    below: list[list[int]] = [[] for _ in thread.nodes]
    for at, node in enumerate(thread.nodes[1:], 1):
        below[node.parent].append(at)
    found = [True] * len(thread.nodes)
    open_calls = Counter[int]()
    todo = [(at, True) for at in below[0]] if below else []
    while todo:
        at, enters = todo.pop()
        function = thread.nodes[at].function
        if enters:
            found[at] = not open_calls[function]
            open_calls[function] += 1
            todo.append((at, False))
            todo += [(child, True) for child in below[at]]
        else:
            open_calls[function] -= 1
    return found


def _ranked(figures: object) -> tuple[Figure, ...]:
    found: list[Figure] = list(figures)  # type: ignore[call-overload]
    return tuple(sorted(found, key=lambda one: (-one.own_s, -one.calls, -one.total_s, one.frame.file, one.frame.line)))
