"""Where one step ends and the next begins: what the trace says first, what its pattern shows second."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from sublight.trace.record import Kind, Trace

SLOW_FIRST = 1.2  # a first step longer than this times the others' median is warm-up
LONG_GAP_NS = 500_000  # an idle gap of a device that can lie between two steps
_STEP_WORDS = re.compile(
    r"\b(step|iter|iteration|batch|train|forward|execute|generate|decode|inference)", re.IGNORECASE
)
_NOT_STEPS = ("nccl:", "gloo:", "c10d::", "enumerate(DataLoader)", "Optimizer.", "DistributedDataParallel", "aten::")

WHOLE = "the whole trace: no step was recognised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps' spans on the host's clock, in order, without overlap, and how they were found."""

    spans_ns: tuple[tuple[int, int], ...]
    found_by: str
    skipped: int = 0  # warm-up steps at the front that are left out

    @property
    def count(self) -> int:
        return len(self.spans_ns)


def find(trace: Trace) -> Steps:
    """The steps of a trace; at worst one step, the whole of it."""
    for found_by, search in _SEARCHES:
        spans = _apart(search(trace))
        if len(spans) >= (1 if found_by == "ProfilerStep ranges" else 2):
            return _without_warm_up(Steps(spans_ns=tuple(spans), found_by=found_by))
    return Steps(spans_ns=(_whole(trace),), found_by=WHOLE)


def _whole(trace: Trace) -> tuple[int, int]:
    """From the host's first event to its last; the device may still be at work after it, as in any step."""
    rows = trace.of_kind(Kind.OP, Kind.RUNTIME, Kind.RANGE, Kind.PYTHON)
    if not len(rows):
        return 0, max(trace.duration_ns, 1)
    return int(trace.start_ns[rows].min()), max(int(trace.end_ns[rows].max()), int(trace.start_ns[rows].min()) + 1)


def _without_warm_up(steps: Steps) -> Steps:
    lengths = [end - start for start, end in steps.spans_ns]
    if len(lengths) >= 3 and lengths[0] > SLOW_FIRST * statistics.median_high(lengths[1:]):
        return Steps(spans_ns=steps.spans_ns[1:], found_by=steps.found_by, skipped=1)
    return steps


def _apart(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in order, without those that overlap an earlier one."""
    kept: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if end > start and (not kept or start >= kept[-1][1]):
            kept.append((start, end))
    return kept


def _named_ranges(trace: Trace, test: Callable[[str], bool]) -> list[tuple[int, int]]:
    """The ranges whose name passes, of the thread that has most of them."""
    rows = trace.rows_named(test, Kind.RANGE)
    if not len(rows):
        return []
    lane = Counter(trace.lane[rows].tolist()).most_common(1)[0][0]
    rows = rows[trace.lane[rows] == lane]
    return list(zip(trace.start_ns[rows].tolist(), trace.end_ns[rows].tolist(), strict=True))


def _profiler_steps(trace: Trace) -> list[tuple[int, int]]:
    return _named_ranges(trace, lambda name: name.startswith("ProfilerStep"))


def _optimizer_steps(trace: Trace) -> list[tuple[int, int]]:
    """Steps from the end of an optimizer's step to the end of its next one."""
    rows = trace.rows_named(lambda name: name.startswith("Optimizer.step"), Kind.RANGE)
    first = _plain(trace.name_of(int(rows[0]))) if len(rows) else ""  # of several that step in turn, one counts
    ends = [end for _, end in _apart(_named_ranges(trace, lambda name: _plain(name) == first))]
    return list(itertools.pairwise(ends))


def _plain(name: str) -> str:
    """A name with its numbers left out: iteration 12 is iteration 13."""
    return re.sub(r"[\d.]+", "#", name)


def _user_ranges(trace: Trace) -> list[tuple[int, int]]:
    """A range that the user repeats, digits aside, and that covers most of the host's time; from start to start."""
    rows = trace.of_kind(Kind.RANGE)
    rows = rows[trace.parents[rows] < 0] if len(rows) else rows
    working = np.bincount(trace.lane[trace.of_kind(Kind.OP, Kind.RUNTIME)], minlength=len(trace.lanes))
    rows = rows[working[trace.lane[rows]] * 5 >= working.max(initial=0)]  # not a loader's thread
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in rows.tolist():
        name = trace.name_of(row)
        if not name.startswith(_NOT_STEPS):
            groups[_plain(name), int(trace.lane[row])].append(row)
    best: list[tuple[int, int]] = []
    best_score = 0.0
    for (name, _), members in groups.items():
        if len(members) < 2:
            continue
        spans = [(int(trace.start_ns[row]), int(trace.end_ns[row])) for row in members]
        covered = sum(end - start for start, end in spans)
        whole = spans[-1][1] - spans[0][0]
        score = covered / max(whole, 1) * (2 if _STEP_WORDS.search(name) else 1)
        if covered > 0.5 * whole and score > best_score:
            best, best_score = spans, score
    starts = [start for start, _ in best]
    return [*itertools.pairwise(starts), best[-1]] if best else []


def _module_calls(trace: Trace) -> list[tuple[int, int]]:
    """Calls of the outermost nn.Module, where Python was recorded."""
    rows = trace.rows_named(lambda name: name.startswith("nn.Module: "), Kind.PYTHON)
    if not len(rows):
        return []
    names = Counter(trace.name_of(row) for row in rows.tolist())
    outer, end = [], -1
    for row in rows.tolist():
        if trace.start_ns[row] >= end:
            outer.append(row)
            end = int(trace.end_ns[row])
    if len(outer) < 2 or names[trace.name_of(outer[0])] < len(outer):
        return []
    return _from_start_to_start([int(trace.start_ns[row]) for row in outer], int(trace.end_ns[outer[-1]]))


def _idle_gaps(trace: Trace) -> list[tuple[int, int]]:
    """Bursts of equally many kernels between long idle gaps of the device."""
    rows = trace.device_rows
    if len(rows) < 4:
        return []
    start, end = trace.start_ns[rows], np.maximum.accumulate(trace.end_ns[rows])
    gaps = start[1:] - end[:-1]
    longest = float(gaps.max())
    cuts = np.flatnonzero(gaps > max(LONG_GAP_NS, longest / 2))
    edges = [0, *(cuts + 1).tolist(), len(rows)]
    counts = np.diff(edges)
    if len(counts) < 2 or counts.max() > 1.1 * counts.min() or counts.min() < 2:
        return []
    return _from_start_to_start([int(start[edge]) for edge in edges[:-1]], int(end[-1]))


def _from_start_to_start(starts: list[int], end: int) -> list[tuple[int, int]]:
    """What follows the last one's work was not recorded, so it is left out where two others show their whole length."""
    spans = list(itertools.pairwise(starts))
    return spans if len(spans) > 1 else [*spans, (starts[-1], end)]


_SEARCHES: tuple[tuple[str, Callable[[Trace], list[tuple[int, int]]]], ...] = (
    ("ProfilerStep ranges", _profiler_steps),
    ("optimizer steps", _optimizer_steps),
    ("a repeated range", _user_ranges),
    ("calls of the outermost module", _module_calls),
    ("idle gaps of the device", _idle_gaps),
)
