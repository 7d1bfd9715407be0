"""growing-cat: torch.cat makes a tensor longer bit by bit, as a key-value cache, and copies all of it each time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule, edit_durations
from sublight.trace.record import Shape

MUCH = 8  # times: the old part is so much larger than what is added
LEAST = 0.02  # of the step


def check(case: Case) -> Change | None:
    trace = case.trace
    made: dict[tuple[object, ...], Counter[int]] = defaultdict(Counter)  # lengths, by the shape without the length
    calls: dict[tuple[object, ...], list[int]] = defaultdict(list)
    goes_on: set[tuple[object, ...]] = set()  # a call got what an earlier one had made
    by_time = sorted(
        (at for at, item in enumerate(case.items) if item.name == "aten::cat"),
        key=lambda at: int(trace.start_ns[case.items[at].row]),
    )
    for at in by_time:
        parts = _parts(trace.detail_of(case.items[at].row).dims)
        if parts is None:
            continue
        others, old, new = parts
        if made[others][old]:
            made[others][old] -= 1
            goes_on.add(others)
        made[others][old + new] += 1
        calls[others].append(at)
    growing = [at for others in goes_on for at in calls[others]]
    spent_s = float(case.split.busy_s[growing].sum())
    if spent_s < LEAST * case.step_s:
        return None
    events = case.events(growing)
    share = np.concatenate([np.full(len(case.events_of[at]), _added(case, at)) for at in growing])
    rows = case.model.event_row[events]
    lines = case.lines(rows.tolist())
    return Change(
        title=f"{case.often(len(growing))} torch.cat a step each copy a whole tensor to make it longer",
        evidence=(
            f"they take {units.text(spent_s, 's')} a step, and more each time: each gets what an earlier one had made",
            *((f"at {lines}",) if lines else ()),
        ),
        fix=_FIX,
        edit=edit_durations(events, case.model.duration_s[events] * share),
        rows=rows,
        ops=("aten::cat",),
    )


def _parts(dims: tuple[object, ...]) -> tuple[tuple[object, ...], int, int] | None:
    """Of a long tensor and a short one that differ in one dimension: the other dimensions, and both lengths."""
    tensors = dims[0] if dims and isinstance(dims[0], tuple) else ()
    if len(tensors) != 2 or not all(isinstance(each, tuple) for each in tensors):
        return None
    old: Shape
    new: Shape
    old, new = tensors  # type: ignore[assignment]
    differ = [axis for axis, (one, other) in enumerate(zip(old, new, strict=False)) if one != other]
    if len(old) != len(new) or len(differ) != 1 or old[differ[0]] < MUCH * new[differ[0]]:
        return None
    axis = differ[0]
    return (axis, *old[:axis], None, *old[axis + 1 :]), old[axis], new[axis]


def _added(case: Case, at: int) -> float:
    """The share of what it writes that is new."""
    old, new = case.trace.detail_of(case.items[at].row).dims[0]
    return float(math.prod(new) / (math.prod(old) + math.prod(new)))


_FIX = """\
# memory for the whole length once, before the loop; each round writes its part
keys = torch.empty(batch, heads, longest, dim, device=device, dtype=dtype)
keys[:, :, position : position + 1] = key            # and attention reads keys[:, :, : position + 1]
# Hugging Face: model.generate(..., cache_implementation="static")"""

GROWING_CAT = Rule(id="growing-cat", check=check)
