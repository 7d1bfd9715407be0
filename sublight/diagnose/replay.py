"""Run a model: when each call returns and each event ends, if the host and the device do what the model says.

Steps are replayed several times over, so that a host that runs ahead gets its lead and a host that falls behind loses
it: the time per step is that of the settled half.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sublight.diagnose.model import Model
from sublight.trace.intervals import Floats
from sublight.trace.record import Ints

SHORT_S = 5e-6  # an event held back longer than this did not wait for its launch
QUEUE = 1022  # launches that a stream holds before the next one waits
MOST_CALLS = 60_000  # of one replay
LEAST_STEPS = 8
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
    before = sum(model.before_s.values(), start=np.zeros(n_calls)).tolist()
    cost, tail, waits_for = model.cost_s.tolist(), model.tail_s.tolist(), model.waits_for.tolist()
    first_event = np.searchsorted(model.call, np.arange(n_calls + 1)).tolist()
    stream, duration = model.stream.tolist(), model.duration_s.tolist()
    latency, delay, after = model.latency_s.tolist(), model.delay_s.tolist(), model.after.tolist()
    free = [0.0] * (int(model.stream.max(initial=-1)) + 1)
    ends: list[float] = []  # of all events so far, in order of launch
    starts: list[float] = []
    launched: list[bool] = []
    host: list[tuple[float, float, float, float, float]] = []
    marks: list[float] = []
    now, busy_until = 0.0, 0.0
    last_of_all = n_calls - 1
    for repeat in range(repeats):
        base = repeat * n_events
        for call in range(n_calls):
            begun = now
            now += before[call]
            queued = len(ends) - QUEUE
            if queued >= 0 and ends[queued] > now and first_event[call] < first_event[call + 1]:
                now = ends[queued]  # the queue is full
            at = now
            for event in range(first_event[call], first_event[call + 1]):
                line = stream[event]
                ready = at + latency[event]
                start, by_launch = ready, True
                if free[line] > start:
                    start, by_launch = free[line], False
                other = after[event]
                if other >= 0 and base + other < len(ends) and ends[base + other] > start:
                    start, by_launch = ends[base + other], False
                start += delay[event]
                by_launch = by_launch and delay[event] < SHORT_S
                if start < at:
                    start = at
                end = start + duration[event]
                free[line] = end
                starts.append(start)
                ends.append(end)
                launched.append(by_launch)
                if end > busy_until:
                    busy_until = end
            now += cost[call]
            wait_start = wait_end = now
            target = waits_for[call]
            if target >= 0 and base + target < len(ends):
                if ends[base + target] > now:
                    wait_end = now = ends[base + target]
                now += tail[call]
            host.append((begun, at, wait_start, wait_end, now))
            if call == last_of_all:
                marks.append(max(now, busy_until))
    half = repeats // 2
    settled_events, settled_calls = slice(half * n_events, None), slice(half * n_calls, None)
    times = np.array(host[settled_calls]).reshape(-1, 5)
    steps = (repeats - half) * model.steps
    return Replay(
        step_s=(marks[-1] - marks[half - 1]) / steps,
        start_s=marks[half - 1],
        end_s=marks[-1],
        steps=steps,
        event=np.tile(np.arange(n_events, dtype=np.int64), repeats - half),
        event_start=np.array(starts[settled_events]),
        event_end=np.array(ends[settled_events]),
        by_launch=np.array(launched[settled_events], dtype=bool),
        call=np.tile(np.arange(n_calls, dtype=np.int64), repeats - half),
        host_start=times[:, 0],
        call_start=times[:, 1],
        wait_start=times[:, 2],
        wait_end=times[:, 3],
        call_end=times[:, 4],
    )
