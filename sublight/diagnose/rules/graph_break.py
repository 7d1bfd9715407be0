"""graph-break: a compiled model falls back to Python in the middle, so it runs as several pieces."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule, fuse
from sublight.diagnose.model import Model
from sublight.trace.intervals import distinct
from sublight.trace.record import Kind

_REGION = re.compile(r"Torch-Compiled Region: (\d+)/")


def check(case: Case) -> Change | None:
    trace = case.trace
    rows = trace.rows_named(lambda name: _REGION.match(name) is not None)
    rows = rows[trace.is_kind(Kind.OP, Kind.RANGE)[rows]]
    rows = case.inside(rows)
    dynamo = trace.meta.get("dynamo")
    reasons = dynamo.get("graph_breaks") if isinstance(dynamo, dict) else None
    regions = Counter(match[1] for row in rows.tolist() if (match := _REGION.match(trace.name_of(row))))
    if len(regions) < 2 or not (reasons or len(regions) > 2):
        return None
    between = _between(case, rows)
    host_s = float((case.model.before_s["launch"] + case.model.before_s["python"])[between].sum()) / case.model.steps
    groups = [group for group in case.groups if group.kind == "compiled"]
    parts = [(case.events(group.items), group.fused_s) for group in groups]

    def edit(model: Model) -> Model:
        """Without the host's time between the pieces and its waits there; what a break kept apart is one kernel."""
        model = fuse(parts)(model) if parts else model
        model = model.without("launch", between).without("python", between)
        waits_for, tail, cost = model.waits_for.copy(), model.tail_s.copy(), model.cost_s.copy()
        waits_for[between], tail[between] = -1, 0.0
        cost[between] = np.minimum(cost[between], 5e-6)
        return model.replace(waits_for=waits_for, tail_s=tail, cost_s=cost)

    texts = [str(reason)[:160] for reason in reasons] if isinstance(reasons, dict) else []
    apart = case.often(sum(len(group.items) for group in groups))
    fused_s = sum(case.device_s(events) for events, _ in parts)
    kept_apart = (
        f"{apart} kernels a step, {units.text(fused_s, 's')}, which a whole graph would fuse, are kept apart",
    )
    return Change(
        title=f"the compiled model runs in {case.often(len(rows))} pieces a step",
        evidence=(
            f"{units.text(host_s, 's')} of Python a step between the pieces",
            *(kept_apart if groups else ()),
            *texts[:3],
        ),
        fix=_FIX,
        edit=edit,
        rows=rows,
    )


def _between(case: Case, regions: np.ndarray) -> np.ndarray:
    """Calls of the model that lie between two compiled regions of one step, and the first of the later region."""
    starts, ends = case.trace.start_ns[regions], case.trace.end_ns[regions]
    step = np.searchsorted([start for start, _ in case.steps.spans_ns], starts, side="right")
    follows = np.append(False, step[1:] == step[:-1])  # another region of its step
    rows = case.model.call_row
    time = np.where(rows >= 0, case.trace.start_ns[np.maximum(rows, 0)], -1)
    place = np.searchsorted(starts, time, side="right") - 1
    inside = (place >= 0) & (time < ends[np.maximum(place, 0)])
    apart = (place >= 0) & ~inside & np.append(follows, False)[place + 1]
    numbers, firsts = np.unique(np.where(inside, place, -1), return_index=True)
    firsts = firsts[(numbers >= 0) & follows[numbers]]
    return distinct(np.concatenate((np.flatnonzero(apart), firsts)))


_FIX = """\
# where and why: TORCH_LOGS=graph_breaks python script.py
model = torch.compile(model, fullgraph=True)     # turns each break into an error with its line
# usual causes: print, .item(), a branch on a tensor's value, a library call: move it out of forward()"""

GRAPH_BREAK = Rule(id="graph-break", check=check)
