"""host-sync: the host waits for the device, so nothing is queued when the device is done."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Edit, Rule, drop, no_wait
from sublight.diagnose.events import SMALL_COPY, WAITS
from sublight.diagnose.model import COPY, Model
from sublight.trace.record import NONE, Ints

SELDOM = 0.5  # a step: a wait every few steps is how to do it


def check(case: Case) -> Change | None:
    calls = syncs(case)
    if case.per_step(len(calls)) < SELDOM:
        return None
    rows = case.model.call_row[calls]
    count = case.per_step(len(calls))
    ops = Counter(_op(case, int(row)) for row in rows.tolist() if row != NONE)
    lines = case.lines(rows.tolist())
    often = ", ".join(f"{name} ×{times / case.model.steps:.0f}" for name, times in ops.most_common(3))
    return Change(
        title=f"the host waits for the device {count:.0f} time{'s' if count > 1.5 else ''} a step, "
        "and the device then waits for the host",
        evidence=(
            f"calls that waited, a step: {often}",
            *((f"at {lines}",) if lines else ()),
            f"idle after a wait: {units.text(case.split.parts['sync'], 's')} a step",
        ),
        fix=_FIX,
        edit=_edit(case, calls),
        rows=rows[rows != NONE],
        ops=tuple(name for name, _ in ops.most_common(5)),
    )


def syncs(case: Case) -> Ints:
    """The calls that waited for anything but the bytes of a large copy, which is another finding's."""
    model, base = case.model, case.base
    waited = np.unique(base.call[base.wait_end > base.wait_start])
    mine = waited[model.wait_kind[waited] == WAITS.index("sync")]
    target = model.waits_for[mine]
    rows = model.event_row[target]
    large = (model.kind[target] == COPY) & (case.trace.bytes[rows] >= SMALL_COPY)
    others: Ints = mine[~large]
    return others


def _edit(case: Case, calls: Ints) -> Edit:
    """Without the waits, and without what the op around each does for them: a copy of a few bytes, its launch."""
    model, trace = case.model, case.trace
    ops = {_top(case, row) for row in model.call_row[calls].tolist() if row != NONE} - {NONE}
    small = np.flatnonzero((model.kind == COPY) & (trace.bytes[model.event_row] < SMALL_COPY))
    read = np.array(
        [event for event in small.tolist() if _top(case, int(model.event_row[event])) in ops], dtype=np.int64
    )

    def edit(changed: Model) -> Model:
        changed = drop(no_wait(changed, calls), read) if len(read) else no_wait(changed, calls)
        launch, cost = changed.before_s["launch"].copy(), changed.cost_s.copy()
        launch[calls] = 0.0
        cost[calls] = 0.0
        return changed.replace(cost_s=cost, before_s={**changed.before_s, "launch": launch})

    return edit


def _top(case: Case, row: int) -> int:
    chain = case.attribution.ops_above(row)
    return chain[-1] if chain else NONE


def _op(case: Case, row: int) -> str:
    """The op that a user knows it by: aten::item rather than cudaStreamSynchronize."""
    chain = case.attribution.ops_above(row)
    return case.trace.name_of(chain[-1] if chain else row)


_FIX = """\
# keep values on the device, and read them seldom, all at once
losses.append(loss.detach())            # not loss.item(), float(loss), print(loss), .cpu(), .nonzero()
if step % 100 == 0:
    print(torch.stack(losses).mean().item()); losses.clear()
# torch.cuda.set_sync_debug_mode("warn") names every one that is left"""

HOST_SYNC = Rule(id="host-sync", check=check)
