"""Run a model: when each call returns and each event ends, if the host and the device do what the model says.

Steps are replayed several times over, so that a host that runs ahead gets its lead and a host that falls behind loses
it: the time per step is that of the settled half. Between two waits, whole runs of calls are worked out at once.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from sublight.diagnose.model import Model
from sublight.trace.intervals import Floats, distinct
from sublight.trace.record import Ints

SHORT_S = 5e-6  # an event held back longer than this did not wait for its launch
QUEUE = 1022  # launches that a stream holds before the next one waits
MOST_CALLS = 60_000  # of one replay
LEAST_STEPS = 8
SHORT = 40  # calls: fewer are faster one by one
ROUNDS = 12  # of streams that wait for each other within a run
MOST_REPEATS = 16


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The times of a replayed model, for its settled repeats."""

    step_s: float
    start_s: float  # of the settled part
    end_s: float
    steps: int  # in the settled part
    # one row an event and a call of the settled part; times on the replay's clock
    event: Ints  # into the model's events
    event_start: Floats
    event_end: Floats
    by_launch: np.ndarray  # the event started when it did because it was launched then
    call: Ints  # into the model's calls
    host_start: Floats  # before the host's time that leads to the call
    call_start: Floats
    wait_start: Floats  # where it begins to wait; the call's end where it does not
    wait_end: Floats
    call_end: Floats


def repeats_of(model: Model) -> int:
    """Enough to settle, not more than a moment's work; even, so that half of it is settled."""
    wanted = max(4, -(-LEAST_STEPS // max(model.steps, 1)))
    affordable = max(2, MOST_CALLS // max(len(model.call_row) + len(model.event_row), 1))
    return max(2, min(wanted, affordable, MOST_REPEATS) // 2 * 2)


def run(model: Model, *, repeats: int = 0) -> Replay:
    """Replay the model; pure arithmetic, in the order of the host's calls."""
    repeats = repeats or repeats_of(model)
    n_calls, n_events = len(model.call_row), len(model.event_row)
    state = _State(model, repeats)
    marks = _played(state, repeats)
    half = repeats // 2
    settled_events, settled_calls = slice(half * n_events, None), slice(half * n_calls, None)
    times = state.host[settled_calls]
    steps = (repeats - half) * model.steps
    return Replay(
        step_s=_settled_s(marks, model),
        start_s=marks[half - 1],
        end_s=marks[-1],
        steps=steps,
        event=np.tile(np.arange(n_events, dtype=np.int64), repeats - half),
        event_start=state.starts[settled_events],
        event_end=state.ends[settled_events],
        by_launch=state.launched[settled_events],
        call=np.tile(np.arange(n_calls, dtype=np.int64), repeats - half),
        host_start=times[:, 0],
        call_start=times[:, 1],
        wait_start=times[:, 2],
        wait_end=times[:, 3],
        call_end=times[:, 4],
    )


def step_s(model: Model, *, repeats: int = 0) -> float:
    """What `run` gives as the step, bit for bit, in half of its time: without the times of each call and event."""
    repeats = repeats or repeats_of(model)
    return _settled_s(_played(_Ends(model, repeats), repeats), model)


def _played(state: _State, repeats: int) -> list[float]:
    """When each repeat ends."""
    pieces = _joined(_pieces(state.model))
    marks = []
    for repeat in range(repeats):
        for first, last, is_long in pieces:
            if not is_long or not state.at_once(repeat, first, last):
                state.one_by_one(repeat, first, last)
        marks.append(max(state.now, state.busy_until))
    return marks


def _settled_s(marks: list[float], model: Model) -> float:
    half = len(marks) // 2
    return (marks[-1] - marks[half - 1]) / ((len(marks) - half) * model.steps)


def _pieces(model: Model) -> list[tuple[int, int]]:
    """Runs of calls in which nothing but the last call waits, and fewer events start than a queue holds."""
    n_calls = len(model.call_row)
    first_event = np.searchsorted(model.call, np.arange(n_calls + 1))
    pieces = []
    waits = (np.flatnonzero(model.waits_for >= 0) + 1).tolist()
    for first, last in itertools.pairwise(sorted({0, n_calls, *waits})):
        while first_event[last] - first_event[first] > QUEUE and last - first > 1:
            middle = int(np.searchsorted(first_event, first_event[first] + QUEUE, side="right")) - 1
            middle = min(max(middle, first + 1), last - 1)
            pieces.append((first, middle))
            first = middle
        pieces.append((first, last))
    return pieces


def _joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """Short runs in a row are one, that goes call by call; and whether each run is a long one.

    >>> _joined([(0, 2), (2, 5), (5, 90), (90, 91)])
    [(0, 5, False), (5, 90, True), (90, 91, False)]
    """
    joined: list[tuple[int, int, bool]] = []
    for first, last in pieces:
        is_long = last - first >= SHORT
        if joined and not is_long and not joined[-1][2]:
            joined[-1] = (joined[-1][0], last, False)
        else:
            joined.append((first, last, is_long))
    return joined


class _State:
    """The clocks, and the times of everything that has run; a repeat's events follow those of the repeat before."""

    def __init__(self, model: Model, repeats: int) -> None:
        n_calls, n_events = len(model.call_row), len(model.event_row)
        self.model, self.n_calls, self.n_events = model, n_calls, n_events
        self.before = sum(model.before_s.values(), start=np.zeros(n_calls))
        self.first = np.searchsorted(model.call, np.arange(n_calls + 1))
        self.free = [0.0] * (int(model.stream.max(initial=-1)) + 1)
        self.starts, self.ends = np.zeros(repeats * n_events), np.zeros(repeats * n_events)
        self.launched = np.zeros(repeats * n_events, dtype=bool)
        self.host = np.zeros((repeats * n_calls, 5))
        self.now = self.busy_until = 0.0

    @functools.cached_property
    def lists(self) -> _Lists:
        return _Lists(self.before, self.first, self.model)

    def one_by_one(self, repeat: int, first: int, last: int) -> None:
        """Calls of a short run, each for itself; comparisons instead of max(), which takes half of the time here."""
        columns = self.lists
        base, now, free, busy_until = repeat * self.n_events, self.now, self.free, self.busy_until
        begun_at = base + columns.first[first]
        starts: list[float] = []
        ends: list[float] = []
        launched: list[bool] = []
        host = []

        def end_of(event: int) -> float:
            return ends[event - begun_at] if event >= begun_at else float(self.ends[event])

        for call in range(first, last):
            begun = now
            now += columns.before[call]
            low, high = columns.first[call], columns.first[call + 1]
            if high > low and base + low >= QUEUE and (end := end_of(base + low - QUEUE)) > now:
                now = end  # the queue is full
            at = now
            for event in range(low, high):
                line, wait = columns.stream[event], columns.delay[event]
                ready = start = at + columns.latency[event]
                if free[line] > start:
                    start = free[line]
                if 0 <= (other := columns.after[event]) < event and (end := end_of(base + other)) > start:
                    start = end
                launched.append(start <= ready and wait < SHORT_S)
                start += wait
                if at > start:
                    start = at
                free[line] = end = start + columns.duration[event]
                starts.append(start)
                ends.append(end)
                if end > busy_until:
                    busy_until = end
            now += columns.cost[call]
            wait_start = wait_end = now
            if 0 <= (target := columns.waits_for[call]) < high:
                if (end := end_of(base + target)) > now:
                    wait_end = end
                now = wait_end + columns.tail[call]
            host.append((begun, at, wait_start, wait_end, now))
        here = slice(begun_at, base + columns.first[last])
        self.starts[here], self.ends[here], self.launched[here] = starts, ends, launched
        self.host[repeat * self.n_calls + first : repeat * self.n_calls + last] = host
        self.now, self.busy_until = now, busy_until

    def at_once(self, repeat: int, first: int, last: int) -> bool:
        """Calls of a long run: `end[i] = max(end[i - 1] + a[i], b[i])` is a running maximum of b less the sum of a.

        Streams that wait for each other are gone over until nothing changes; False where that takes too long.
        """
        model, base = self.model, repeat * self.n_events
        low, high = int(self.first[first]), int(self.first[last])
        done = base + self.first[first:last]  # events before each call
        launches = (self.first[first + 1 : last + 1] > self.first[first:last]) & (done >= QUEUE)
        room = np.where(launches, self.ends[np.maximum(done - QUEUE, 0)], -np.inf) if high > low else -np.inf
        cost = model.cost_s[first:last]
        at = _running(self.now, self.before[first:last] + np.concatenate(([0.0], cost[:-1])), room)
        called = at[model.call[low:high] - first]
        if not self._streams(base, low, high, called):
            return False
        calls = slice(repeat * self.n_calls + first, repeat * self.n_calls + last)
        over = at + cost
        self.host[calls, 0] = np.concatenate(([self.now], over[:-1]))
        self.host[calls, 1] = at
        self.host[calls, 2:] = over[:, None]
        self._wait(repeat, last - 1)
        return True

    def _streams(self, base: int, low: int, high: int, called: Floats) -> bool:
        """When the events of a run start and end, each stream at once."""
        model, here = self.model, slice(base + low, base + high)
        ready = called + model.latency_s[low:high]
        after = model.after[low:high]
        held_back = np.flatnonzero((after >= 0) & (after < np.arange(low, high)))
        delay, duration, stream = model.delay_s[low:high], model.duration_s[low:high], model.stream[low:high]
        lines = [(line, np.flatnonzero(stream == line)) for line in distinct(stream).tolist()]
        starts, ends = np.empty(high - low), np.full(high - low, -np.inf)
        idle, held = np.empty(high - low, dtype=bool), np.full(high - low, -np.inf)
        self.ends[here] = -np.inf
        for _ in range(ROUNDS):
            held[held_back] = self.ends[base + after[held_back]]
            for line, mine in lines:
                least = np.maximum(ready[mine], held[mine])
                earliest = np.maximum(least + delay[mine], called[mine])
                ends[mine] = _running(self.free[line], delay[mine] + duration[mine], earliest + duration[mine])
                free = np.concatenate(([self.free[line]], ends[mine][:-1]))
                starts[mine] = np.maximum(np.maximum(least, free) + delay[mine], called[mine])
                idle[mine] = (free <= ready[mine]) & (held[mine] <= ready[mine])
            settled = not len(held_back) or np.array_equal(self.ends[here], ends)
            self.ends[here] = ends
            if settled:
                break
        else:
            return False
        self.starts[here], self.launched[here] = starts, idle & (delay < SHORT_S)
        for line, mine in lines:
            self.free[line] = float(ends[mine][-1])
        self.busy_until = max(self.busy_until, float(ends.max(initial=0.0)))
        return True

    def _wait(self, repeat: int, call: int) -> None:
        """Of a run, only the last call can wait."""
        row = self.host[repeat * self.n_calls + call]
        target = int(self.model.waits_for[call])
        if 0 <= target < self.first[call + 1]:
            row[3] = max(row[2], float(self.ends[repeat * self.n_events + target]))
            row[4] = row[3] + self.model.tail_s[call]
        self.now = float(row[4])


class _Ends(_State):
    """The same clocks, with no more kept than later calls depend on: when each event ends."""

    @functools.cached_property
    def rows(self) -> tuple[list[Any], list[Any]]:
        """Of each call and each event what a replay takes; -1 where one waits for nothing."""
        model, high = self.model, self.first[1:]
        target = np.where(model.waits_for < high, model.waits_for, -1)
        after = np.where(model.after < np.arange(self.n_events), model.after, -1)
        calls = (self.before, self.first[:-1], high, model.cost_s, target, model.tail_s)
        events = (model.stream, model.delay_s, model.latency_s, after, model.duration_s)
        as_rows = [list(zip(*(column.tolist() for column in columns), strict=True)) for columns in (calls, events)]
        return as_rows[0], as_rows[1]

    def one_by_one(self, repeat: int, first: int, last: int) -> None:
        """As above, sum by sum: a test holds that both agree."""
        base, now, free, busy_until = repeat * self.n_events, self.now, self.free, self.busy_until
        begun = int(self.first[first])  # this run's ends are in the list, those before in the array
        calls, events = self.rows
        ends: list[float] = []
        for before, low, high, cost, target, tail in calls[first:last]:
            now += before
            if high > low and (full := base + low - QUEUE) >= 0:
                end = ends[full - base - begun] if full >= base + begun else float(self.ends[full])
                if end > now:
                    now = end
            for line, wait, latency, after, duration in events[low:high]:
                start = now + latency
                if free[line] > start:
                    start = free[line]
                if after >= 0:
                    end = ends[after - begun] if after >= begun else float(self.ends[base + after])
                    if end > start:
                        start = end
                start += wait
                if now > start:
                    start = now
                free[line] = end = start + duration
                ends.append(end)
                if end > busy_until:
                    busy_until = end
            now += cost
            if target >= 0:
                end = ends[target - begun] if target >= begun else float(self.ends[base + target])
                if end > now:
                    now = end
                now += tail
        self.ends[base + begun : base + int(self.first[last])] = ends
        self.now, self.busy_until = now, busy_until


class _Lists:
    """The model's columns as lists: single values of an array are slow to get."""

    def __init__(self, before: Floats, first: Ints, model: Model) -> None:
        self.before, self.cost, self.tail = before.tolist(), model.cost_s.tolist(), model.tail_s.tolist()
        self.waits_for, self.first = model.waits_for.tolist(), first.tolist()
        self.stream, self.duration = model.stream.tolist(), model.duration_s.tolist()
        self.latency, self.delay, self.after = model.latency_s.tolist(), model.delay_s.tolist(), model.after.tolist()


def _running(start: float, step: Floats, least: Floats | float) -> Floats:
    """x[i] = max(x[i - 1] + step[i], least[i]), from `start` on.

    >>> _running(1.0, np.array([1.0, 1.0, 1.0]), np.array([0.0, 5.0, 0.0])).tolist()
    [2.0, 5.0, 6.0]
    """
    total = np.cumsum(step)
    result: Floats = total + np.maximum(np.maximum.accumulate(least - total), start)
    return result
