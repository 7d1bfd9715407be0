"""What the device's events waited for, and what the host's calls waited for, read off their times.

An event starts when it was launched, its stream is free, and what it waits for on another stream is done. Work that
was launched before the recording began is in neither list: nobody waits for it in the steps that follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sublight.trace import communication, intervals
from sublight.trace.intervals import Floats, Intervals, distinct, middle
from sublight.trace.record import NONE, Ints, Kind, Mask, Trace

NEAR_S = 5e-6  # two events this close in time are taken as one causing the other
WIDE_S = 50e-6  # a wait across streams takes up to this long to be noticed: 17 µs under ROCm
LATENCY_S = 4e-6  # from a launch call's start to its kernel's, where the trace has no idle launch to read it from
UNSEEN_S = 1e-3  # a stream's first event this late was held back by what ran before the trace began
QUEUE_FULL = 1000  # launches under way: from here on a call may wait for room
SLOW_CALL_S = 100e-6  # a launch that takes longer, with the device at work, waits for room
SMALL_COPY = 1 << 16  # a blocking copy of less is there for the sync, not for the bytes
MOST_LOOKED_AT = 64  # events that ended just before a late one, of which one may have held it back
LONG_KERNEL_S, FEW_LAUNCHES, ALL_BLOCK = 100e-6, 5, 0.9  # kernels that end inside their own launch call: of those so
# long, at least so many, and this share of all
NOT_IN_MODEL = -2  # an event of before the steps, or of before the recording

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
WAITS = ("", "sync", "copy", "allocator")  # what a waiting call waits in


@dataclass(frozen=True, kw_only=True)
class Events:
    """One row an event of the model, in order of its call; times on the trace's clock."""

    rows: Ints
    call: Ints
    stream: Ints
    start: Floats
    end: Floats
    duration: Floats
    latency: Floats  # from its call's start
    delay: Floats  # after everything that it is known to wait for
    after: Ints  # the event of another stream that it waited for, or NONE


@dataclass(frozen=True, kw_only=True)
class Waits:
    """One row a call: its own cost, the event it waited for, from that event's end to the call's, and the kind."""

    cost: Floats
    waits_for: Ints
    tail: Floats
    kind: Ints  # into WAITS


def read(trace: Trace, rows: Ints, call: Ints, call_start: Floats, around: Ints) -> Events:
    """`around`: every row of the device, those that are not in the model with them."""
    start, end = trace.span_s(rows)
    launched = call_start[call] if len(call) else np.empty(0)
    previous = _previous_end(trace, around)[rows]
    latency = start - launched
    idle = (previous < launched) & (latency < WIDE_S)
    typical = middle(latency[idle]) if idle.any() else LATENCY_S
    typical = min(max(typical, 1e-6), 20e-6)
    by_launch = previous <= launched + typical  # nothing before it on its stream held it back
    ready = np.maximum(previous, launched + typical)
    late = start - ready
    after = _held_by(trace, rows, call, ready, around)
    alone = by_launch & (after == NONE) & (latency < UNSEEN_S)
    delay = np.where(alone, 0.0, late)
    delay[np.isinf(previous) & (late > UNSEEN_S)] = 0.0  # earlier work, from before the trace, held it back
    delay[after == NOT_IN_MODEL] = 0.0
    after[after == NOT_IN_MODEL] = NONE
    held = after != NONE
    delay[held] = start[held] - np.maximum(ready[held], end[after[held]])
    return Events(
        rows=rows,
        call=call,
        stream=np.unique(trace.lane[rows], return_inverse=True)[1].astype(np.int64),
        start=start,
        end=end,
        duration=end - start,
        latency=np.where(alone, np.maximum(latency, 0.0), typical),
        delay=delay,
        after=after,
    )


def synchronous(rows: Ints, call: Ints, duration: Floats) -> Events:
    """Events of a CPU trace, where each call is its own event."""
    nothing = np.zeros(len(rows))
    return Events(
        rows=rows,
        call=call,
        stream=np.zeros(len(rows), dtype=np.int64),
        start=nothing,
        end=duration,
        duration=duration,
        latency=nothing,
        delay=nothing,
        after=np.full(len(rows), NONE, dtype=np.int64),
    )


def _previous_end(trace: Trace, around: Ints) -> Floats:
    """For each row of the trace the end of the event before it on the same stream, whoever launched that."""
    previous = np.full(len(trace), -np.inf)
    order = around[np.argsort(trace.lane[around], kind="stable")]  # rows are in order of start
    for mine in np.split(order, np.flatnonzero(np.diff(trace.lane[order])) + 1):
        previous[mine[1:]] = np.maximum.accumulate(trace.end_ns[mine])[:-1] / 1e9
    return previous


def _held_by(trace: Trace, rows: Ints, call: Ints, ready: Floats, around: Ints) -> Ints:
    """The event of another stream that ended just before a late event began; NOT_IN_MODEL where it is of before.

    Within NEAR_S any such event counts. Later than that, one that ended in the second half of the wait: what starts a
    stream again takes its time, and between computing and communicating it is the usual reason.
    """
    after = np.full(len(rows), NONE, dtype=np.int64)
    start_s, end_s = trace.span_s(rows)[0], trace.span_s(around)[1]
    late = np.flatnonzero(start_s - ready > NEAR_S)
    lanes = distinct(trace.lane[around])
    if not len(late) or len(lanes) < 2:
        return after
    order = np.argsort(end_s, kind="stable")
    number = np.full(len(trace), NOT_IN_MODEL, dtype=np.int64)
    number[rows] = np.arange(len(rows))
    call_of = np.full(len(trace), -1, dtype=np.int64)  # what is of before was called before
    call_of[rows] = call
    talks = communication.named(trace)[trace.name]
    behind = around[order]
    ends, lane, earlier, talk = end_s[order].tolist(), trace.lane[behind], call_of[behind].tolist(), talks[behind]
    lane_of, talk_of, number_of = lane.tolist(), talk.tolist(), number[behind].tolist()
    places = np.searchsorted(end_s[order], start_s[late] + 1e-9, side="right") - 1
    for at, last in zip(late.tolist(), places.tolist(), strict=True):
        row, began = int(rows[at]), float(start_s[at])
        reach = max(NEAR_S, min(WIDE_S, (began - float(ready[at])) / 2))
        own_lane, own_talk, own_call = int(trace.lane[row]), bool(talks[row]), int(call[at])
        best = NONE
        for place in range(last, max(last - MOST_LOOKED_AT, -1), -1):
            gap = began - ends[place]
            if gap >= reach:
                break
            if lane_of[place] == own_lane or earlier[place] >= own_call:
                continue
            if gap < NEAR_S or talk_of[place] != own_talk:
                best = number_of[place]
                break
            best = number_of[place] if best == NONE else best
        after[at] = best
    return after


def waits(trace: Trace, calls: Ints, start: Floats, end: Floats, events: Events, around: Ints) -> Waits:
    """What each call waited for; a call that found the device's queue full has no cost of its own for that."""
    count = len(calls)
    cost, waits_for = end - start, np.full(count, NONE, dtype=np.int64)
    tail, kind = np.zeros(count), np.zeros(count, dtype=np.int64)
    own = np.full(count, NONE, dtype=np.int64)
    own[events.call[::-1]] = np.arange(len(events.call))[::-1]  # a call's first event
    launching = own != NONE
    _room(trace, calls, start, end, events, around, cost, launching)
    if len(events.rows):
        rows = events.rows[own]
        within = (events.start[own] < end) & (events.end[own] <= end + NEAR_S / 2)
        blocking = launching & within & (trace.kind[rows] == Kind.MEMCPY) & (end - start > 2 * NEAR_S)
        small = (trace.bytes[rows] >= 0) & (trace.bytes[rows] < SMALL_COPY)
        # a kernel's launch does not wait for its kernel, however late it returns, unless they all do
        kernels = launching & (trace.kind[rows] == Kind.KERNEL)
        inside = kernels & (events.start[own] < end) & (events.end[own] <= end + WIDE_S)  # two clocks may differ
        long = kernels & (events.duration[own] > LONG_KERNEL_S)
        if long.sum() >= FEW_LAUNCHES and (long & inside).sum() > ALL_BLOCK * long.sum():
            blocking |= inside
            small |= kernels
        waits_for[blocking] = own[blocking]
        kind[blocking] = np.where(small[blocking], WAITS.index("sync"), WAITS.index("copy"))
        tail[blocking] = np.maximum(end[blocking] - events.end[own[blocking]], 0.0)
        cost[blocking] = 0.0
    _syncs(trace, calls, start, end, events, around, ~launching, (cost, waits_for, tail, kind))
    return Waits(cost=cost, waits_for=waits_for, tail=tail, kind=kind)


def _room(
    trace: Trace, calls: Ints, start: Floats, end: Floats, events: Events, around: Ints, cost: Floats, launching: Mask
) -> None:
    """Launches that waited for room in the queue cost what others cost: the replay has a queue of its own."""
    numbers = np.flatnonzero(launching)
    last = np.full(len(calls), -np.inf)
    np.maximum.at(last, events.call, events.end)
    finished = np.sort(last[numbers])
    queued = np.searchsorted(numbers, np.arange(len(calls))) - np.searchsorted(finished, start, side="right")
    free = launching & (calls != NONE) & (queued < QUEUE_FULL)
    typical = middle(cost[free]) if free.any() else 5e-6
    slow = launching & (cost > SLOW_CALL_S)
    slow[slow] = _busy_share(busy(trace, around), start[slow], end[slow]) > 0.5
    full = launching & (slow | (queued >= QUEUE_FULL))
    cost[full] = np.minimum(cost[full], typical)


def busy(trace: Trace, rows: Ints) -> Intervals:
    """When the device was at work."""
    return intervals.union(*trace.span_s(rows))


def _busy_share(busy: Intervals, start: Floats, end: Floats) -> Floats:
    return intervals.overlaps(start, end, busy) / np.maximum(end - start, 1e-12)


def _syncs(
    trace: Trace, calls: Ints, start: Floats, end: Floats, events: Events, around: Ints, others: Mask,
    columns: tuple[Floats, Ints, Floats, Ints],
) -> None:  # fmt: skip
    """Calls that start nothing and wait: for the last event that ended in them, if it was called before."""
    cost, waits_for, tail, kind = columns
    kinds = np.array(
        [
            WAITS.index("sync" if name.startswith(SYNCS) else "allocator" if name.startswith(ALLOCATORS) else "")
            for name in trace.names
        ],
        dtype=np.int64,
    )
    mine = np.flatnonzero(others & (calls != NONE))
    kind[mine] = kinds[trace.name[calls[mine]]] if len(mine) else 0
    mine = mine[kind[mine] > 0]
    if not len(mine):
        return
    number = np.full(len(trace), NOT_IN_MODEL, dtype=np.int64)
    number[events.rows] = np.arange(len(events.rows))
    end_s = trace.span_s(around)[1]
    order = np.argsort(end_s, kind="stable")
    ends, numbers = end_s[order].tolist(), number[around[order]].tolist()
    call_of = events.call.tolist()
    last = np.searchsorted(end_s[order], end[mine] + NEAR_S / 2, side="right") - 1
    for at, place in zip(mine.tolist(), last.tolist(), strict=True):
        while place >= 0 and ends[place] > start[at]:
            event = numbers[place]
            if event == NOT_IN_MODEL:  # of before the steps: a step that follows others does not wait for it
                cost[at] = min(cost[at], NEAR_S)
                break
            if call_of[event] < at:
                waits_for[at], tail[at], cost[at] = event, max(end[at] - ends[place], 0.0), 0.0
                break
            place -= 1
