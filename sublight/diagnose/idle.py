"""device-idle: the device does nothing for a good part of the step, and no finding says why.

A step is healthy only if its device is at work. Where it is not, and no rule has a word about it, the largest part of
the idle time is named as it is, with what the host did in its longest stretches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sublight import units
from sublight.diagnose import breakdown, fusion, replay
from sublight.diagnose.case import Case, Change
from sublight.diagnose.model import Model
from sublight.diagnose.record import BREAKDOWN, BUSY
from sublight.trace import intervals
from sublight.trace.record import Ints, Kind

ID = "device-idle"
LEAST = 0.1  # of the step
GAPS = 3  # that are described, the longest
EXPLAINED = {  # the findings that speak of a part, whatever of it they leave
    "launch": ("launch-bound",),
    "sync": ("host-sync",),
    "data": ("data-loading", "worker-restart"),
    "python": ("host-bound", "recompilation", "graph-break", "worker-restart"),
    "copy": ("pageable-copy", "exposed-copy"),
    "allocator": ("allocator-thrash",),
    "communication": ("exposed-communication", "rank-imbalance"),
    "start_up": ("start-up",),
}
_WHY = {
    "launch": "the host is too slow to launch",
    "sync": "the host waits, and then has nothing queued",
    "data": "the next batch is not there",
    "python": "the host is in Python",
    "copy": "copies run with no kernel beside them",
    "allocator": "the allocator is at the driver",
    "communication": "collectives run with no kernel beside them",
    "start_up": "something comes up for the first time",
    "other": "it waits for something that the trace does not show",
}


def unexplained(case: Case, fixed: Model, found: Sequence[str], step_s: float) -> Change | None:
    """The largest part of the idle time that is still there after everything found is `fixed`; where nothing that was
    found is worth its name, the largest of all.
    """
    left = breakdown.split(fixed, replay.run(fixed), case.items, fusion.saved(case.items, case.groups)).parts
    missing_s = max(step_s - case.step_s, 0.0)  # of the step that was timed: the recording does not have it
    now = {**case.split.parts, "other": case.split.parts["other"] + missing_s}
    parts = {
        name: min(left[name] + (missing_s if name == "other" else 0.0), now[name]) if found else now[name]
        for name in BREAKDOWN
        if name not in BUSY and not set(EXPLAINED.get(name, ())) & set(found)
    }
    worst = max(parts, key=lambda name: parts[name], default="")
    if not worst or parts[worst] <= LEAST * step_s:
        return None
    idle_s = sum(seconds for name, seconds in now.items() if name not in BUSY)
    rows, lines = _longest(case)
    what = "the device is idle" if case.on_gpu else "no op runs"
    return Change(
        title=f"{what} for {units.percent(idle_s / step_s)} of the step: {_WHY[worst]}",
        evidence=(f"{BREAKDOWN[worst]}: {units.text(now[worst], 's')} a step", *lines),
        fix=(_FIX_SCRIPT_OTHER if worst == "other" else _FIX_SCRIPT) if "samples" in case.trace.meta else _FIX,
        edit=lambda model: model,
        saving_s=parts[worst],
        rows=rows,
    )


def _longest(case: Case) -> tuple[Ints, list[str]]:
    """What the host did in the device's longest gaps: the longest call or op in each, and a line on it."""
    trace = case.trace
    first, last = case.steps.spans_ns[0][0] / 1e9, case.steps.spans_ns[-1][1] / 1e9
    busy = intervals.union(*trace.span_s(case.model.event_row))
    gaps = intervals.complement(busy, first, max(last, float(busy[-1, 1]) if len(busy) else last))
    gaps = gaps[np.argsort(gaps[:, 0] - gaps[:, 1], kind="stable")][:GAPS]
    host = trace.of_kind(Kind.RUNTIME, Kind.OP, Kind.RANGE)
    start, end = trace.span_s(host)
    rows, lines = [], []
    for begin, until in gaps.tolist():
        inside = np.minimum(end, until) - np.maximum(start, begin)
        length = units.text(until - begin, "s")
        if not len(inside) or inside.max() < 0.5 * (until - begin):
            lines.append(f"a gap of {length}, in which no op and no call is recorded")
            continue
        row = int(host[np.flatnonzero(inside >= 0.9 * inside.max())[-1]])  # the innermost that fills it
        rows.append(row)
        source, module = case.attribution.place(row)
        at = f", at {source or module}" if source or module else ""
        lines.append(f"a gap of {length} during {trace.name_of(row)[:80]} of {_length(case, row)}{at}")
    return np.array(rows, dtype=np.int64), lines


def _length(case: Case, row: int) -> str:
    return units.text(float(case.trace.end_ns[row] - case.trace.start_ns[row]) * 1e-9, "s")


_FIX_SCRIPT = """\
# what the host does in the gaps above is the place to look"""
_FIX_SCRIPT_OTHER = """\
# nothing of the script's ran there: other programs on this machine, a full disk or memory, a wait inside of a library;
# `sublight pyprof script.py` shows where each thread is"""
_FIX = """\
# what the host does in the gaps above is the place to look: `sublight explain script.py` names its lines;
# a trace of later steps leaves out what happens once: torch.profiler.schedule(wait=5, warmup=3, active=5)"""
