"""Where in the user's Python the time between ops goes: samples of the main thread's stack, less the ops themselves.

A capture looks at the stacks some hundred times during steps that run without the profiler. A look does not tell
whether an op was running, so what the recorded ops of a line took is taken off that line's looks, scaled so that what
is left is the time between ops. The looks give shares only: the seconds are the model's.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sublight.diagnose.case import Case
from sublight.diagnose.source import PLACE
from sublight.diagnose.unprofiled import crowded
from sublight.sampling import Frame, Row, Samples
from sublight.trace.record import NONE, Kind

# labels of the looks, the better ones first. Where Python may keep the lock for 5 ms, as in timed steps beside other
# threads, a loop that is shorter is never seen, and the op behind it, which gives the lock up, is seen in its place.
OFTEN, PLAIN, PROFILED, SEARCH = ("sampled",), ("timed", "sampled"), ("profiled",), ("finding",)
ENOUGH = 20  # looks of the first kind, for the others to be left out
FEWEST = 5  # looks, below which they tell nothing
MOST_OPS = 20_000  # whose line is looked up
MOST_FACTOR, ROUNDS = 16.0, 20  # by which an op's time may differ; of narrowing that down
# a frame of these at the bottom is no Python: the engine runs ops, or the device is waited for
_NO_PYTHON = (
    ("torch/autograd/graph.py", "_engine_run_backward"),
    ("torch/cuda/__init__.py", "synchronize"),
    ("torch/cuda/streams.py", "synchronize"),
    ("torch/_ops.py", ""),
)
LOADER = "torch/utils/data/"
OUR_CALL = "sublight_call"  # a frame that the capture puts around modules and optimizers
_WORKERS = ("_MultiProcessingDataLoaderIter.__init__", "_MultiProcessingDataLoaderIter._shutdown_workers")
_INSIDE = re.compile(r"(?<=.)(?:\.<locals>)?\.<(?:lambda|(?:list|set|dict)comp|genexpr)>$")
_Key = tuple[str, str, int]  # file, function, line


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A function of the user's, and what of the Python time is spent in it."""

    file: str
    function: str
    line: int  # the one that takes most
    share: float  # of all Python time between ops
    line_share: float  # the line's own
    looks: int  # that it was seen in
    waited: float  # of its time, how much the thread slept or waited; 0 where other programs had the cores
    called: tuple[Frame, ...]  # the library's frames below the line, where most of its time goes
    stack: tuple[Frame, ...]  # the user's frames down to it, outermost first

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(slots=True)
class _Line:
    wall_s: float = 0.0
    waited_s: float = 0.0
    looks: int = 0
    below: dict[tuple[Frame, ...], float] = field(default_factory=lambda: defaultdict(float))
    stack: tuple[Frame, ...] = ()


def spots(
    case: Case, *, in_loader: bool = False, apart: Callable[[Spot], bool] = lambda line: False
) -> tuple[Spot, ...]:
    """The user's functions by their Python time, most first; `in_loader`: those that a DataLoader runs in this process.

    Lines that `apart` holds of are not taken together with the others of their function. Nothing where the trace has no
    samples, or too few.
    """
    found = _samples(case.trace.meta.get("samples"))
    if found is None:
        return ()
    samples, mine, steps = found
    for labels in (OFTEN, PLAIN, PROFILED, SEARCH):
        count = sum(steps.get(label, 0) for label in labels) or int(labels == SEARCH)
        seen = list(samples.of(*labels, thread=0))
        rows = [row for row in seen if _is_loader(samples.stack(row)) == in_loader]
        if count > 0 and len(rows) >= (ENOUGH if labels == OFTEN else FEWEST):
            lines = _lines(samples, mine, rows, _everywhere(samples, seen))
            if sum(line.looks for line in lines.values()) < FEWEST:
                continue
            spent_s = {key: line.wall_s / count for key, line in lines.items()}
            if not in_loader:
                whole_s = sum(row.wall_ns for row in seen) * 1e-9 / count
                spent_s = _without_ops(spent_s, _ops_s(case), whole_s * _python_share(case))
            return _spots(lines, spent_s, apart, waits=not crowded(case.trace))
    return ()


def _python_share(case: Case) -> float:
    """The share of the step that passes in Python between ops."""
    return float(case.model.before_s["python"].sum()) / case.model.steps / max(case.step_s, 1e-12)


def _without_ops(
    spent_s: Mapping[_Key, float], ops_s: Mapping[tuple[str, int], float], python_s: float
) -> dict[_Key, float]:
    """Each line less its ops. In the steps that were looked at an op may take longer than in the recorded ones, or
    shorter: by so much that what is left of all lines is the time between ops.
    """

    def left(factor: float) -> dict[_Key, float]:
        return {key: max(s - factor * ops_s.get((key[0], key[2]), 0.0), 0.0) for key, s in spent_s.items()}

    low, high = 0.0, MOST_FACTOR
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(left(middle).values()) > python_s else (low, middle)
    return left(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The main thread's time in some stacks."""

    seconds: float = 0.0  # a step, of those that were looked at: their mean may be longer than that of the timed ones
    share: float = 0.0  # of those steps
    steps: int = 0
    looks: int = 0
    times: int = 0  # how often it began


def spent(case: Case, wanted: Callable[[tuple[Frame, ...]], bool]) -> Spent:
    found = _samples(case.trace.meta.get("samples"))
    if found is None:
        return Spent()
    samples, _, steps = found
    numbers = {
        number for number, stack in enumerate(samples.stacks) if wanted(tuple(samples.frames[at] for at in stack))
    }
    for labels in (PLAIN, PROFILED):
        count = sum(steps.get(label, 0) for label in labels)
        seen = list(samples.of(*labels, thread=0))
        rows = [row for row in seen if row.stack in numbers]
        if count > 0 and rows:
            wall_ns, whole_ns = (sum(row.wall_ns for row in each) for each in (rows, seen))
            is_there = [row.stack in numbers for row in seen]
            times = sum(here and not before for before, here in zip([False, *is_there], is_there, strict=False))
            return Spent(
                seconds=wall_ns * 1e-9 / count,
                share=wall_ns / max(whole_ns, 1),
                steps=count,
                looks=len(rows),
                times=times,
            )
    return Spent()


def starts_workers(stack: tuple[Frame, ...]) -> bool:
    """Whether a DataLoader starts or ends its worker processes there."""
    return any(frame.file == f"{LOADER}dataloader.py" and frame.function in _WORKERS for frame in stack)


def _samples(data: Any) -> tuple[Samples, tuple[bool, ...], Mapping[str, int]] | None:
    """The samples that the capture wrote; None where there are none, or the file is damaged."""
    if not isinstance(data, dict):
        return None
    try:
        samples = Samples.from_json(data)
        mine = tuple(bool(is_mine) for is_mine in data["mine"])
        steps = {str(label): int(count) for label, count in data["steps"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    return (samples, mine, steps) if len(mine) == len(samples.frames) else None


def _is_loader(stack: tuple[Frame, ...]) -> bool:
    return any(frame.file.startswith(LOADER) for frame in stack)


def _lines(
    samples: Samples, mine: tuple[bool, ...], rows: Sequence[Row], everywhere: frozenset[int]
) -> dict[tuple[str, str, int], _Line]:
    """The looks by the innermost line of the user's, but for those in which no Python ran, or only the capture's own.

    A line that all looks saw runs every step from inside a library, as `trainer.train()`: there, the library's function
    is named, which is neither torch's nor Python's own.
    """
    lines: dict[tuple[str, str, int], _Line] = defaultdict(_Line)
    for row in rows:
        stack, numbers = samples.stack(row), samples.stacks[row.stack]
        own = [at for at, number in enumerate(numbers) if mine[number]]
        if not own or _runs_ops(stack[-1]) or any(map(_is_captures, stack[own[-1] + 1 :])):
            continue
        if numbers[own[-1]] in everywhere:
            own += [at for at in range(own[-1] + 1, len(stack)) if not _is_beneath(stack[at])][-1:]
        frame = stack[own[-1]]
        below = tuple(called for called in stack[own[-1] + 1 :] if called.function != OUR_CALL)
        line = lines[frame.file, owner(frame.function), frame.line]
        line.wall_s += row.wall_ns * 1e-9
        line.waited_s += row.wall_ns * 1e-9 if row.waited else 0.0
        line.looks += 1
        line.below[below] += row.wall_ns * 1e-9
        line.stack = tuple(stack[at] for at in own)
    return lines


def owner(function: str) -> str:
    """The function that a lambda or a comprehension stands in: it is that one's work.

    >>> [owner(name) for name in ("f.<locals>.<lambda>.<locals>.<listcomp>", "f.<locals>.g", "<lambda>", "<module>")]
    ['f', 'f.<locals>.g', '<lambda>', '<module>']
    """
    while (outer := _INSIDE.sub("", function)) != function:
        function = outer
    return function


def _everywhere(samples: Samples, rows: Sequence[Row]) -> frozenset[int]:
    """The frames, by number, that all looks at the steps have in common; none where they all are the same stack."""
    stacks = {samples.stacks[row.stack] for row in rows}
    return frozenset.intersection(*map(frozenset, stacks)) if len(stacks) > 1 else frozenset()


def _is_beneath(frame: Frame) -> bool:
    """Whether it is torch's, or of Python's own library."""
    package = frame.file.partition("/")[0].removesuffix(".py")
    return package == "torch" or package.startswith("<") or package in sys.stdlib_module_names


def _is_captures(frame: Frame) -> bool:
    return "sublight/trace/capture/" in frame.file or frame.file.endswith("sublight/sampling.py")


def _runs_ops(frame: Frame) -> bool:
    return any(frame.file == file and function in frame.function for file, function in _NO_PYTHON)


def _ops_s(case: Case) -> dict[tuple[str, int], float]:
    """What the ops of each line took of a recorded step, by file and line."""
    trace, spent = case.trace, defaultdict[tuple[str, int], float](float)
    tops = case.attribution.top_ops
    low, high = case.steps.spans_ns[-1]
    inside = (trace.start_ns[tops] >= low) & (trace.start_ns[tops] < high) & (trace.kind[tops] == Kind.OP)
    for row in tops[inside][:MOST_OPS].tolist():
        if case.attribution.forward(row) != NONE:  # in backward: its line is the forward's, which did not run then
            continue
        if match := PLACE.match(case.attribution.place(row)[0]):
            spent[match["file"], int(match["line"])] += float(trace.end_ns[row] - trace.start_ns[row]) * 1e-9
    return spent


def _spots(
    lines: Mapping[_Key, _Line], left: Mapping[_Key, float], apart: Callable[[Spot], bool], *, waits: bool
) -> tuple[Spot, ...]:
    total_s = sum(left.values())
    if total_s <= 0:
        return ()
    functions: dict[tuple[str, str, bool], list[tuple[Spot, _Line]]] = defaultdict(list)
    for key, line in lines.items():
        share = left[key] / total_s
        spot = Spot(
            file=key[0],
            function=key[1],
            line=key[2],
            share=share,
            line_share=share,
            looks=line.looks,
            waited=0.0,
            called=max(line.below.items(), key=lambda pair: pair[1])[0],
            stack=line.stack,
        )
        functions[key[0], key[1], apart(spot)].append((spot, line))
    found = []
    for members in functions.values():
        hottest = max((spot for spot, _ in members), key=lambda spot: spot.share)
        wall_s = sum(line.wall_s for _, line in members)
        found.append(
            replace(
                hottest,
                share=sum(spot.share for spot, _ in members),
                looks=sum(line.looks for _, line in members),
                waited=sum(line.waited_s for _, line in members) / wall_s if wall_s and waits else 0.0,
            )
        )
    return tuple(sorted(found, key=lambda spot: -spot.share))
