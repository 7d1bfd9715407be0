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

from sublight.diagnose import events
from sublight.diagnose.events import ALLOCATORS, SYNCS, Events, Waits
from sublight.diagnose.work import COMPILING, COPIES, LOADING, Item, of_device, started_by
from sublight.trace import communication, intervals
from sublight.trace.attribute import Attribution
from sublight.trace.intervals import Floats, distinct
from sublight.trace.record import NONE, Ints, Kind, Trace
from sublight.trace.steps import Steps

PYTHON_S = 100e-6  # host time with no torch event in it: shorter is the glue between ops, longer is the user's Python
TALKING = (
    "gloo:",
    "mpi:",
    "nccl:",
    "hccl:",
    "xccl:",
)  # where there is no device, the collective is the host's own time
COMPUTE, COPY, COMMUNICATION = 0, 1, 2
START_UP_S = 2e-3  # an API call that takes longer, with the device idle, brings something up
LAUNCH_S = 5e-6  # of a launch call, where it has to be guessed


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

    def scaled(self, factor: float) -> Model:
        """The same, every time of it so many times as long."""
        times = ("cost_s", "tail_s", "duration_s", "latency_s", "delay_s")
        before = {cause: factor * column for cause, column in self.before_s.items()}
        return self.replace(before_s=before, **{name: factor * getattr(self, name) for name in times})

    def without(self, cause: str, calls: Any = slice(None), *, share: float = 1.0) -> Model:
        """The same without the host's time of this cause, or this share of it, everywhere or before these calls."""
        column = self.before_s[cause].copy()
        column[calls] *= 1.0 - share
        return self.replace(before_s={**self.before_s, cause: column})


def build(attribution: Attribution, steps: Steps, rows: Ints, items: list[Item], item_of: Ints) -> Model:
    """The model of a trace with device events `rows`."""
    trace = attribution.trace
    first, last = steps.spans_ns[0][0], steps.spans_ns[-1][1]
    around = of_device(trace, rows)
    launch = started_by(attribution, rows)
    calls = _calls(trace, launch, first, last)
    start, end = trace.span_s(calls)
    once = start_up(trace, calls, around, steps)
    late = np.isin(calls, once) | _slow_to_launch(trace, calls, rows, launch, around)
    start = np.where(late, np.maximum(start, end - LAUNCH_S), start)  # the launch itself is the end of such a call
    # an event without a call, as in a trace of the device alone, is started by a call of no cost at its own start
    lonely = rows[(launch == NONE) | ~np.isin(launch, calls)]
    calls = np.concatenate((calls, np.full(len(lonely), NONE, dtype=np.int64)))
    start, end = (np.concatenate((times, trace.span_s(lonely)[0])) for times in (start, end))
    order = np.argsort(start, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    number = np.zeros(len(trace), dtype=np.int64)  # of a call, or of an event that has none
    number[calls[: len(calls) - len(lonely)]] = place[: len(calls) - len(lonely)]
    number[lonely] = place[len(calls) - len(lonely) :]
    calls, start, end = calls[order], start[order], end[order]
    call = number[np.where(np.isin(rows, lonely), rows, np.maximum(launch, 0))]
    by_call = np.lexsort((trace.start_ns[rows], call))
    rows, call, item_of = rows[by_call], call[by_call], item_of[by_call]
    host = _Host(trace, calls, start, end, steps, intervals.union(*trace.span_s(once)))
    read = events.read(trace, rows, call, start, around)
    waits = events.waits(trace, calls, start, end, read, around)
    return host.with_markers(waits, read, item_of, _event_kinds(trace, rows, items, item_of))


def start_up(trace: Trace, calls: Ints, around: Ints, steps: Steps) -> Ints:
    """API calls in which a driver or a library comes up: long, with the device idle, and not in every step.

    Contexts, streams, the code of a kernel at its first launch. A wait by its name is none of them.
    """
    threads = distinct(trace.lane[calls])
    rows = trace.of_kind(Kind.RUNTIME)
    rows = rows[np.isin(trace.lane[rows], threads) & (trace.end_ns[rows] - trace.start_ns[rows] > START_UP_S * 1e9)]
    rows = rows[(trace.start_ns[rows] >= steps.spans_ns[0][0]) & (trace.start_ns[rows] < steps.spans_ns[-1][1])]
    waiting = np.array([name.startswith(SYNCS) or "Memcpy" in name for name in trace.names], dtype=bool)
    rows = rows[~waiting[trace.name[rows]]]
    start, end = trace.span_s(rows)
    idle = intervals.overlaps(start, end, events.busy(trace, around)) < 0.1 * (end - start)
    rows = rows[idle]
    often = np.bincount(trace.name[rows], minlength=len(trace.names)) >= steps.count / 2
    kept: Ints = rows[~often[trace.name[rows]]] if steps.count > 1 else rows
    return kept


def build_cpu(trace: Trace, steps: Steps, items: list[Item]) -> Model:
    """The model of a trace without a device: every item is a call that waits for itself."""
    rows = np.array([item.row for item in items], dtype=np.int64)
    start, end = trace.span_s(rows)
    reach = np.maximum.accumulate(np.concatenate(([0.0], end)))[:-1]
    start = np.maximum(start, reach)  # of two threads at once, the time is counted once
    end = np.maximum(end, start)
    host = _Host(trace, rows, start, end, steps, np.empty((0, 2)))
    numbers = np.arange(len(rows), dtype=np.int64)
    nothing = np.zeros(len(rows))
    read = events.synchronous(rows, numbers, end - start)
    waits = Waits(cost=nothing, waits_for=numbers.copy(), tail=nothing, kind=np.zeros(len(rows), dtype=np.int64))
    return host.with_markers(waits, read, numbers.copy(), np.zeros(len(rows), dtype=np.int64))


def _slow_to_launch(trace: Trace, calls: Ints, rows: Ints, launch: Ints, around: Ints) -> Any:
    """Calls that take long before their kernel starts, though the device is idle: not for want of room."""
    start, end = trace.span_s(calls)
    slow = end - start > events.SLOW_CALL_S
    slow[slow] = intervals.overlaps(start[slow], end[slow], events.busy(trace, around)) < (end - start)[slow] / 2
    kernels = (trace.kind[rows] == Kind.KERNEL) & (launch != NONE)
    first_ns = np.full(len(trace), np.iinfo(np.int64).max)
    np.minimum.at(first_ns, launch[kernels], trace.start_ns[rows[kernels]])
    began = first_ns[calls] / 1e9
    return slow & (began < np.iinfo(np.int64).max / 1e9) & (began > (start + end) / 2)


def _calls(trace: Trace, launch: Ints, first_ns: int, last_ns: int) -> Ints:
    """Launches, syncs and allocations on the threads that launch, without those inside another call."""
    launching = distinct(launch)
    launching = launching[launching != NONE]
    threads = distinct(trace.lane[launching])
    named = trace.rows_named(lambda name: name.startswith((*SYNCS, *ALLOCATORS)))
    named = named[(trace.kind[named] == Kind.RUNTIME) & np.isin(trace.lane[named], threads)]
    named = named[(trace.start_ns[named] >= first_ns) & (trace.start_ns[named] < last_ns)]
    above = trace.parents[named]
    named = named[(above == NONE) | (trace.kind[np.maximum(above, 0)] != Kind.RUNTIME)]
    return distinct(np.concatenate((launching, named)))


class _Host:
    """The host's time between calls, by cause, on a clock that runs only inside the steps."""

    def __init__(
        self, trace: Trace, calls: Ints, start: Floats, end: Floats, steps: Steps, once: intervals.Intervals
    ) -> None:
        spans = np.array(steps.spans_ns, dtype=np.float64) * 1e-9
        self.spans, self.calls, self.start, self.end = spans, calls, start, end
        self.step = np.clip(np.searchsorted(spans[:, 0], start, side="right") - 1, 0, len(spans) - 1)
        self.trace = trace
        rows = trace.of_kind(Kind.RUNTIME, Kind.OP)
        threads = distinct(trace.lane[calls[calls != NONE]])
        if not len(threads):  # no launch belongs to an event of the file: the host's time is that of the ops' threads
            threads = distinct(trace.lane[trace.of_kind(Kind.OP)])
        rows = rows[np.isin(trace.lane[rows], threads)]
        self.torch_rows = rows
        self.recorded = np.sort(trace.span_s(rows)[0])
        self.causes = self._causes(threads, once)

    def _causes(self, threads: Any, once: intervals.Intervals) -> dict[str, intervals.Intervals]:
        """When the host was loading data, compiling, starting something up, or in Python of its own."""
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
            "start_up": intervals.subtract(intervals.subtract(once, data), compiling),
            "communication": talking,
            "python": python,
        }

    def _encloses_call(self, rows: Ints) -> Any:
        """Which rows enclose a call of the model: on the way down from it in the tree of its thread."""
        enclosing = np.zeros(len(self.trace), dtype=bool)
        at = self.calls[self.calls != NONE]
        while len(at):
            at = self.trace.parents[at]
            at = distinct(at[at != NONE])
            at = at[~enclosing[at]]
            enclosing[at] = True
        enclosing[self.calls[self.calls != NONE]] = True
        return enclosing[rows]

    def with_markers(self, waits: Waits, read: Events, item_of: Ints, kinds: Ints) -> Model:
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
            cost_s=spread(waits.cost, 0.0),
            waits_for=spread(waits.waits_for, NONE),
            tail_s=spread(waits.tail, 0.0),
            wait_kind=spread(waits.kind, 0),
            torch_events=np.maximum(recorded, 0).astype(np.int64),
            event_row=read.rows,
            call=old_place[read.call] if len(read.call) else read.call,
            stream=read.stream,
            kind=kinds,
            item=item_of,
            duration_s=read.duration,
            latency_s=read.latency,
            delay_s=read.delay,
            after=read.after,
        )


def _event_kinds(trace: Trace, rows: Ints, items: list[Item], item_of: Ints) -> Ints:
    copies = np.array([name.startswith(COPIES) for name in trace.names], dtype=bool)
    kinds = np.where(copies[trace.name[rows]], COPY, COMPUTE).astype(np.int64)
    talks = np.array([item.family == "communication" for item in items], dtype=bool)
    kinds[talks[item_of] | communication.named(trace)[trace.name[rows]]] = COMMUNICATION
    return kinds
