"""A step as a chain of host calls and the device events they start: what the replay runs, and rules change.

Host: calls in order, each with the host's time before it, by cause, and its own cost; some wait for an event. Device:
events in order on streams; an event starts when it was launched, its stream is free, and what it waits for is done.
All of it is read off the trace, so the replay of an unchanged model gives the traced times again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from sublight.diagnose.work import COMPILING, COPIES, LOADING, Item
from sublight.trace import intervals
from sublight.trace.attribute import Attribution
from sublight.trace.intervals import Floats
from sublight.trace.record import NONE, Ints, Kind, Trace
from sublight.trace.steps import Steps

PYTHON_S = 100e-6  # host time with no torch event in it: shorter is the glue between ops, longer is the user's Python
NEAR_S = 5e-6  # two events this close in time are taken as one causing the other
LATENCY_S = 4e-6  # from a launch call's start to its kernel's, where the trace has no idle launch to read it from
UNSEEN_S = 1e-3  # a stream's first event this late was held back by what ran before the trace began
QUEUE_FULL = 1000  # launches under way: from here on a call may wait for room
SMALL_COPY = 1 << 16  # a blocking copy of less is there for the sync, not for the bytes

SYNCS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize",
    "cuCtxSynchronize", "cuEventSynchronize", "hipStreamSynchronize", "hipDeviceSynchronize", "hipEventSynchronize",
    "cudaThreadSynchronize",
)  # fmt: skip
ALLOCATORS = (
    "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost", "cuMemCreate", "cuMemMap", "cuMemUnmap",
    "cuMemRelease", "cuMemSetAccess", "cuMemAddressReserve", "hipMalloc", "hipFree", "hipHostMalloc",
    "cudaHostRegister",
)  # fmt: skip
TALKING = ("gloo:", "mpi:", "nccl:")  # where there is no device, the collective is the host's own time
COMPUTE, COPY, COMMUNICATION = 0, 1, 2
WAITS = ("", "sync", "copy", "allocator")  # what a waiting call waits in


@dataclass(frozen=True, kw_only=True)
class Model:
    """The used steps, one row a call and one row an event; rules give changed copies."""

    steps: int
    # host calls; the last of each step is a marker that ends it
    call_row: Ints  # the API call's row (the op's on a CPU), or NONE
    step: Ints
    before_s: dict[str, Floats]  # by cause: the host's time between the last call and this one
    cost_s: Floats  # the call's own time, without waiting
    waits_for: Ints  # the event whose end it waits for, or NONE
    tail_s: Floats  # from that end to the call's return
    wait_kind: Ints  # into WAITS
    torch_events: Ints  # recorded in the time before and in the call: each cost the profiler something
    # device events, in order of their calls
    event_row: Ints
    call: Ints  # the call that started it
    stream: Ints
    kind: Ints  # COMPUTE, COPY or COMMUNICATION
    item: Ints
    duration_s: Floats
    latency_s: Floats  # from its call's start
    delay_s: Floats  # after everything that it is known to wait for
    after: Ints  # an event of another stream that it waits for, or NONE

    def replace(self, **columns: Any) -> Model:
        return dataclasses.replace(self, **columns)

    def without(self, cause: str, calls: Any = slice(None)) -> Model:
        """The same without the host's time of this cause, everywhere or before these calls."""
        column = self.before_s[cause].copy()
        column[calls] = 0.0
        return self.replace(before_s={**self.before_s, cause: column})


def build(attribution: Attribution, steps: Steps, rows: Ints, items: list[Item], item_of: Ints) -> Model:
    """The model of a trace with device events `rows`."""
    trace = attribution.trace
    first, last = steps.spans_ns[0][0], steps.spans_ns[-1][1]
    calls = _calls(attribution, rows, first, last)
    start, end = trace.span_s(calls)
    launch = attribution.launch[rows]
    # an event without a call, as in a trace of the device alone, is started by a call of no cost at its own start
    lonely = rows[(launch == NONE) | ~np.isin(launch, calls)]
    calls = np.concatenate((calls, np.full(len(lonely), NONE, dtype=np.int64)))
    start, end = (np.concatenate((times, trace.span_s(lonely)[0])) for times in (start, end))
    order = np.argsort(start, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    calls, start, end = calls[order], start[order], end[order]
    number = {int(row): at for at, row in enumerate(calls.tolist()) if row != NONE}
    number_of_lonely = dict(zip(lonely.tolist(), place[len(place) - len(lonely) :].tolist(), strict=True))
    launched_by = attribution.launch[rows].tolist()
    call = np.array(
        [number_of_lonely.get(row, number.get(by, 0)) for row, by in zip(rows.tolist(), launched_by, strict=True)],
        dtype=np.int64,
    )
    by_call = np.lexsort((trace.start_ns[rows], call))
    rows, call, item_of = rows[by_call], call[by_call], item_of[by_call]
    host = _Host(trace, calls, start, end, steps)
    events = _Events(trace, rows, call, start)
    waits = _waits(trace, calls, start, end, events)
    return host.with_markers(waits, events, item_of, _event_kinds(trace, rows, items, item_of))


def build_cpu(trace: Trace, steps: Steps, items: list[Item]) -> Model:
    """The model of a trace without a device: every item is a call that waits for itself."""
    rows = np.array([item.row for item in items], dtype=np.int64)
    start, end = trace.span_s(rows)
    reach = np.maximum.accumulate(np.concatenate(([0.0], end)))[:-1]
    start = np.maximum(start, reach)  # of two threads at once, the time is counted once
    end = np.maximum(end, start)
    host = _Host(trace, rows, start, end, steps)
    numbers = np.arange(len(rows), dtype=np.int64)
    nothing = np.zeros(len(rows))
    events = _Events.synchronous(rows, numbers, end - start)
    waits = (nothing, numbers.copy(), nothing.copy(), np.zeros(len(rows), dtype=np.int64))
    return host.with_markers(waits, events, numbers.copy(), np.zeros(len(rows), dtype=np.int64))


def _calls(attribution: Attribution, rows: Ints, first_ns: int, last_ns: int) -> Ints:
    """Launches, syncs and allocations on the threads that launch, without those inside another call."""
    trace = attribution.trace
    launching = np.unique(attribution.launch[rows])
    launching = launching[launching != NONE]
    threads = np.unique(trace.lane[launching])
    named = trace.rows_named(lambda name: name.startswith((*SYNCS, *ALLOCATORS)))
    named = named[(trace.kind[named] == Kind.RUNTIME) & np.isin(trace.lane[named], threads)]
    named = named[(trace.start_ns[named] >= first_ns) & (trace.start_ns[named] < last_ns)]
    above = trace.parents[named]
    named = named[(above == NONE) | (trace.kind[np.maximum(above, 0)] != Kind.RUNTIME)]
    return np.unique(np.concatenate((launching, named)))


class _Host:
    """The host's time between calls, by cause, on a clock that runs only inside the steps."""

    def __init__(self, trace: Trace, calls: Ints, start: Floats, end: Floats, steps: Steps) -> None:
        spans = np.array(steps.spans_ns, dtype=np.float64) * 1e-9
        self.spans, self.calls, self.start, self.end = spans, calls, start, end
        self.step = np.clip(np.searchsorted(spans[:, 0], start, side="right") - 1, 0, len(spans) - 1)
        self.trace = trace
        rows = trace.of_kind(Kind.RUNTIME, Kind.OP)
        threads = np.unique(trace.lane[calls[calls != NONE]])
        rows = rows[np.isin(trace.lane[rows], threads)]
        self.torch_rows = rows
        self.recorded = np.sort(trace.span_s(rows)[0])
        self.causes = self._causes(threads)

    def _causes(self, threads: Any) -> dict[str, intervals.Intervals]:
        """When the host was loading data, compiling, or in Python of its own."""
        trace, (low, high) = self.trace, (self.spans[0, 0], self.spans[-1, 1])

        def named(words: tuple[str, ...]) -> intervals.Intervals:
            found = trace.rows_named(lambda name: any(word in name for word in words))
            found = found[trace.is_kind(Kind.RANGE, Kind.OP)[found] & np.isin(trace.lane[found], threads)]
            return intervals.union(*trace.span_s(found))

        data, compiling = named(LOADING), named(COMPILING)
        talking = np.empty((0, 2))
        if not trace.on_gpu:
            rows = trace.rows_named(lambda name: name.startswith(TALKING))
            talking = intervals.union(*trace.span_s(rows))
        rows = self.torch_rows
        start, end = trace.span_s(rows)
        # an op that starts nothing on the device and takes long is host work like any Python
        idle_op = (trace.kind[rows] == Kind.OP) & (end - start > PYTHON_S) & ~self._encloses_call(rows)
        busy = intervals.union(start[~idle_op], end[~idle_op])
        free = intervals.complement(busy, low, high)
        python = free[free[:, 1] - free[:, 0] > PYTHON_S]
        python = intervals.subtract(intervals.subtract(intervals.subtract(python, data), compiling), talking)
        return {
            "data": data,
            "compile": intervals.subtract(compiling, data),
            "communication": talking,
            "python": python,
        }

    def _encloses_call(self, rows: Ints) -> Any:
        """Which rows enclose a call of the model: on the way down from it in the tree of its thread."""
        enclosing = np.zeros(len(self.trace), dtype=bool)
        at = self.calls[self.calls != NONE]
        while len(at):
            at = self.trace.parents[at]
            at = np.unique(at[at != NONE])
            at = at[~enclosing[at]]
            enclosing[at] = True
        enclosing[self.calls[self.calls != NONE]] = True
        return enclosing[rows]

    def with_markers(self, waits: Any, events: _Events, item_of: Ints, kinds: Ints) -> Model:
        """The model, with a call at the end of each step that takes the host's time since its last call."""
        count, steps = len(self.calls), len(self.spans)
        where = np.searchsorted(self.step, np.arange(steps), side="right")  # each marker stands behind its step's calls
        # calls keep their order; a marker's place is counted among the calls
        old_place = np.arange(count) + np.searchsorted(where, np.arange(count), side="right")
        marker_place = where + np.arange(steps)
        total = count + steps
        start, end = np.empty(total), np.empty(total)
        start[old_place], end[old_place] = self.start, self.end
        start[marker_place] = end[marker_place] = self.spans[:, 1]
        reach = np.maximum.accumulate(np.concatenate(([self.spans[0, 0]], end)))[:-1]
        gap_start, gap_end = np.minimum(reach, start), start
        inside = intervals.union(self.spans[:, 0], self.spans[:, 1])
        whole = intervals.overlaps(gap_start, gap_end, inside)
        before = {cause: np.zeros(total) for cause in self.causes}
        left = whole.copy()
        for cause in before:
            during = intervals.intersect(self.causes[cause], inside)
            before[cause] = np.minimum(intervals.overlaps(gap_start, gap_end, during), left)
            left = left - before[cause]
        cost, waits_for, tail, wait_kind = waits
        step = np.empty(total, dtype=np.int64)
        step[old_place], step[marker_place] = self.step, np.arange(steps)
        recorded = np.searchsorted(self.recorded, end, side="right") - np.searchsorted(self.recorded, gap_start)

        def spread(values: Any, empty: Any) -> Any:
            column = np.full(total, empty, dtype=np.asarray(values).dtype)
            column[old_place] = values
            return column

        return Model(
            steps=steps,
            call_row=spread(self.calls, NONE),
            step=step,
            before_s={"launch": left, **before},
            cost_s=spread(cost, 0.0),
            waits_for=spread(waits_for, NONE),
            tail_s=spread(tail, 0.0),
            wait_kind=spread(wait_kind, 0),
            torch_events=np.maximum(recorded, 0).astype(np.int64),
            event_row=events.rows,
            call=old_place[events.call] if len(events.call) else events.call,
            stream=events.stream,
            kind=kinds,
            item=item_of,
            duration_s=events.duration,
            latency_s=events.latency,
            delay_s=events.delay,
            after=events.after,
        )


class _Events:
    """What each event waited for, read off its start."""

    rows: Ints
    call: Ints
    stream: Ints
    start: Floats
    end: Floats
    duration: Floats
    latency: Floats
    delay: Floats
    after: Ints

    def __init__(self, trace: Trace, rows: Ints, call: Ints, call_start: Floats) -> None:
        self.rows, self.call = rows, call
        self.start, self.end = trace.span_s(rows)
        self.duration = self.end - self.start
        self.stream = np.unique(trace.lane[rows], return_inverse=True)[1].astype(np.int64)
        launched = call_start[call] if len(call) else np.empty(0)
        previous = self._previous_end()
        latency = self.start - launched
        idle = previous < launched
        typical = float(np.median(latency[idle & (latency < 50e-6)])) if (idle & (latency < 50e-6)).any() else LATENCY_S
        typical = min(max(typical, 1e-6), 20e-6)
        by_launch = previous <= launched + typical  # nothing before it on its stream held it back
        ready = np.maximum(previous, launched + typical)
        late = self.start - ready
        self.after = self._held_by(late)
        self.latency = np.where(by_launch & (self.after == NONE) & (latency < 1e-3), np.maximum(latency, 0.0), typical)
        self.delay = np.where(by_launch & (self.after == NONE) & (latency < 1e-3), 0.0, late)
        unseen = np.isinf(previous) & (late > UNSEEN_S)  # earlier work, from before the trace, held it back
        self.delay[unseen] = 0.0
        held = self.after != NONE
        self.delay[held] = self.start[held] - np.maximum(ready[held], self.end[self.after[held]])

    @classmethod
    def synchronous(cls, rows: Ints, call: Ints, duration: Floats) -> _Events:
        events = cls.__new__(cls)
        events.rows, events.call, events.duration = rows, call, duration
        events.stream = np.zeros(len(rows), dtype=np.int64)
        events.latency, events.delay = np.zeros(len(rows)), np.zeros(len(rows))
        events.after = np.full(len(rows), NONE, dtype=np.int64)
        return events

    def _previous_end(self) -> Floats:
        """The end of what ran before on the same stream."""
        previous = np.full(len(self.rows), -np.inf)
        for stream in range(int(self.stream.max(initial=-1)) + 1):
            mine = np.flatnonzero(self.stream == stream)
            mine = mine[np.argsort(self.start[mine], kind="stable")]
            previous[mine[1:]] = np.maximum.accumulate(self.end[mine])[:-1]
        return previous

    def _held_by(self, late: Floats) -> Ints:
        """An event of another stream that ended just before a late event began."""
        after = np.full(len(self.rows), NONE, dtype=np.int64)
        order = np.argsort(self.end, kind="stable")
        ends = self.end[order]
        for at in np.flatnonzero(late > NEAR_S).tolist():
            place = int(np.searchsorted(ends, self.start[at] + 1e-9, side="right")) - 1
            while place >= 0 and self.start[at] - ends[place] < NEAR_S:
                other = int(order[place])
                if self.stream[other] != self.stream[at] and self.call[other] < self.call[at]:
                    after[at] = other
                    break
                place -= 1
        return after


def _event_kinds(trace: Trace, rows: Ints, items: list[Item], item_of: Ints) -> Ints:
    copies = np.array([name.startswith(COPIES) for name in trace.names], dtype=bool)
    kinds = np.where(copies[trace.name[rows]], COPY, COMPUTE).astype(np.int64)
    talks = np.array([item.family == "communication" for item in items], dtype=bool)
    kinds[talks[item_of]] = COMMUNICATION
    return kinds


def _waits(trace: Trace, calls: Ints, start: Floats, end: Floats, events: _Events) -> tuple[Floats, Ints, Floats, Ints]:
    """Each call's own cost, the event it waited for, the time from that event's end to the call's, and the kind."""
    count = len(calls)
    cost, waits_for = end - start, np.full(count, NONE, dtype=np.int64)
    tail, kind = np.zeros(count), np.zeros(count, dtype=np.int64)
    names = ["" if row == NONE else trace.name_of(row) for row in calls.tolist()]
    order = np.argsort(events.end, kind="stable")
    ends = events.end[order]
    own: dict[int, int] = {int(call): at for at, call in enumerate(events.call.tolist())}  # its last event
    launching = np.array(sorted(own), dtype=np.int64)
    finished = np.sort(events.end[[own[at] for at in launching.tolist()]])
    queued = np.searchsorted(launching, np.arange(count)) - np.searchsorted(finished, start, side="right")
    free = [at for at in own if names[at] and queued[at] < QUEUE_FULL]
    launch_cost = float(np.median(cost[free])) if free else 5e-6
    for at, name in enumerate(names):
        if at in own:
            event = own[at]
            row = int(events.rows[event])
            within = events.start[event] < end[at] and events.end[event] <= end[at] + NEAR_S / 2
            # a kernel's launch never waits for its kernel, however late it returns
            if trace.kind[row] == Kind.MEMCPY and cost[at] > 2 * NEAR_S and within:
                small = 0 <= trace.bytes[row] < SMALL_COPY
                waits_for[at], kind[at] = event, WAITS.index("sync" if small else "copy")
                tail[at], cost[at] = max(end[at] - events.end[event], 0.0), 0.0
            elif cost[at] > 100e-6 or queued[at] >= QUEUE_FULL:
                cost[at] = min(cost[at], launch_cost)  # the call waited for room: the replay has a queue of its own
        elif name.startswith((*SYNCS, *ALLOCATORS)):
            place = int(np.searchsorted(ends, end[at] + NEAR_S / 2, side="right")) - 1
            while place >= 0 and ends[place] > start[at]:
                event = int(order[place])
                if events.call[event] < at:
                    waits_for[at], tail[at], cost[at] = event, max(end[at] - ends[place], 0.0), 0.0
                    break
                place -= 1
            kind[at] = WAITS.index("sync" if name.startswith(SYNCS) else "allocator")
    return cost, waits_for, tail, kind
