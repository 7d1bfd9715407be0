"""Where a step's time goes: every instant of the replay is counted once, so the parts add up to the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sublight.diagnose.events import WAITS
from sublight.diagnose.model import COMMUNICATION, COMPUTE, COPY, Model
from sublight.diagnose.record import BREAKDOWN
from sublight.diagnose.replay import Replay
from sublight.diagnose.work import Item
from sublight.trace import intervals
from sublight.trace.intervals import Floats, Intervals

AFTER_SYNC_S = 50e-6  # an idle gap that begins this close to the end of a wait is the wait's doing


@dataclass(frozen=True, kw_only=True)
class Split:
    """A step's parts, and what they were made from."""

    parts: dict[str, float]  # seconds per step, keys of BREAKDOWN
    busy_s: Floats  # by item of the model: device time per step in which it is the one that counts
    floor_s: Floats  # of that, by item: what is left after fusion, at the floor; an unknown cost counts as measured


def split(model: Model, replay: Replay, items: list[Item], saved_s: Floats) -> Split:
    """`saved_s`: what fusion would take off each item's floor, per call."""
    window = (replay.start_s, replay.end_s)
    kind = model.kind[replay.event]
    sets = {which: _union(replay, kind == which, window) for which in (COMPUTE, COPY, COMMUNICATION)}
    compute = sets[COMPUTE]
    copy = intervals.subtract(sets[COPY], compute)
    talk = intervals.subtract(intervals.subtract(sets[COMMUNICATION], compute), sets[COPY])
    everything = intervals.union(*np.concatenate(list(sets.values())).T) if len(replay.event) else np.empty((0, 2))
    idle = intervals.complement(everything, *window)
    parts = dict.fromkeys(BREAKDOWN, 0.0)
    parts["copy"] = intervals.length(copy)
    parts["communication"] = intervals.length(talk)
    busy = _busy_by_item(model, replay, len(items), window)
    known = np.array([item.floor_s is not None for item in items], dtype=bool)
    scale = replay.steps / model.steps
    floor = np.minimum(np.array([item.floor_s or 0.0 for item in items]) * scale, busy)
    fusable = np.minimum(saved_s * scale, floor)
    parts["floor"] = float((floor - fusable)[known].sum())
    parts["fusable"] = float(fusable[known].sum())
    parts["above_floor"] = float((busy - floor)[known].sum())
    parts["unknown"] = float(busy[~known].sum())
    for cause, seconds in _idle_by_cause(model, replay, idle).items():
        parts[cause] += seconds
    per_step = {name: seconds / replay.steps for name, seconds in parts.items()}
    per_step["other"] += replay.step_s - sum(per_step.values())  # rounding
    per_step["other"] = max(per_step["other"], 0.0)
    left = np.where(known, floor - fusable, busy) / replay.steps
    return Split(parts=per_step, busy_s=busy / replay.steps, floor_s=left)


def _union(replay: Replay, which: np.ndarray, window: tuple[float, float]) -> Intervals:
    return intervals.clip(intervals.union(replay.event_start[which], replay.event_end[which]), *window)


def _busy_by_item(model: Model, replay: Replay, count: int, window: tuple[float, float]) -> Floats:
    """Compute time by item; where two overlap, the one that began first has the time."""
    mine = np.flatnonzero(model.kind[replay.event] == COMPUTE)
    order = mine[np.argsort(replay.event_start[mine], kind="stable")]
    start = np.clip(replay.event_start[order], *window)
    end = np.clip(replay.event_end[order], *window)
    reach = np.concatenate(([window[0]], np.maximum.accumulate(end)[:-1])) if len(end) else end
    alone = np.maximum(end - np.maximum(start, reach), 0.0)
    return np.bincount(model.item[replay.event[order]], weights=alone, minlength=count).astype(np.float64)


def _idle_by_cause(model: Model, replay: Replay, idle: Intervals) -> dict[str, float]:
    """Idle time by what the host did meanwhile, where the event that ends the gap was waiting for its launch."""
    order = np.argsort(replay.event_start, kind="stable")
    at = np.searchsorted(replay.event_start[order], idle[:, 1] - 1e-12)
    found = at < len(order)
    hosts = np.ones(len(idle), dtype=bool)  # a gap that nothing ends is the host's
    hosts[found] = replay.by_launch[order[at[found]]]
    causes = {"other": intervals.length(idle[~hosts])}
    gaps = idle[hosts]
    if not len(gaps):
        return causes
    spent = _host_intervals(model, replay)
    left = gaps[:, 1] - gaps[:, 0]
    by_cause: dict[str, Floats] = {}
    for cause, spans in spent.items():
        by_cause[cause] = np.minimum(intervals.overlaps(gaps[:, 0], gaps[:, 1], spans), left)
        left = left - by_cause[cause]
    after_sync = _after_wait(replay, model, gaps)
    by_cause["sync"] = by_cause["sync"] + np.where(after_sync, by_cause["launch"] + left, 0.0)
    by_cause["launch"] = np.where(after_sync, 0.0, by_cause["launch"] + left)  # what is left is the launch's latency
    for cause, seconds in by_cause.items():
        causes[cause] = causes.get(cause, 0.0) + float(seconds.sum())
    return causes


def _host_intervals(model: Model, replay: Replay) -> dict[str, Intervals]:
    """What the host did when; inside the time before a call, its causes one after the other."""
    causes = ("data", "start_up", "communication", "python", "allocator", "copy", "sync")
    spans: dict[str, list[tuple[Floats, Floats]]] = {cause: [] for cause in causes}
    at = replay.host_start.copy()
    for cause, part in (
        ("data", "data"),
        ("compile", "python"),
        ("start_up", "start_up"),
        ("communication", "communication"),
        ("python", "python"),
    ):
        end = at + model.before_s[cause][replay.call]
        spans[part].append((at, end))
        at = end
    kinds = model.wait_kind[replay.call]
    for number, name in enumerate(WAITS):
        if name:
            mine = kinds == number
            spans[name].append((replay.wait_start[mine], replay.call_end[mine]))
    allocator = kinds == WAITS.index("allocator")
    spans["allocator"].append((replay.call_start[allocator], replay.call_end[allocator]))
    result = {name: intervals.union(*map(np.concatenate, zip(*pairs, strict=True))) for name, pairs in spans.items()}
    result["launch"] = intervals.union(replay.host_start, replay.call_end)
    return result


def _after_wait(replay: Replay, model: Model, gaps: Intervals) -> np.ndarray:
    """Gaps that began when a wait ended: the host had nothing queued, because it had waited."""
    waited = (model.wait_kind[replay.call] == WAITS.index("sync")) & (replay.wait_end > replay.wait_start)
    ends = np.sort(replay.wait_end[waited])
    if not len(ends):
        return np.zeros(len(gaps), dtype=bool)
    near = np.searchsorted(ends, gaps[:, 0] - AFTER_SYNC_S / 10)
    return (near < len(ends)) & (ends[np.minimum(near, len(ends) - 1)] < gaps[:, 0] + AFTER_SYNC_S)
