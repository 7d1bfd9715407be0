"""rank-imbalance: some ranks compute longer, and the others wait for them in the collectives."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.work import device_rows
from sublight.trace import intervals, steps
from sublight.trace.attribute import attribute
from sublight.trace.costs import kernel_family
from sublight.trace.record import Trace

LEAST = 0.02


def check(case: Case) -> Change | None:
    if not case.others:
        return None
    ranks = [case.trace, *case.others]
    busy = np.array([compute_s(trace) for trace in ranks])
    lost = float(busy.max() - busy.mean())
    if lost < LEAST * case.step_s:
        return None
    slowest = ranks[int(busy.argmax())]
    return Change(
        title=f"rank {_name(slowest)} computes {units.text(float(busy.max()), 's')} a step, the average rank "
        f"{units.text(float(busy.mean()), 's')}: the others wait",
        evidence=tuple(
            f"rank {_name(trace)}: {units.text(float(s), 's')}" for trace, s in zip(ranks, busy, strict=True)
        ),
        fix=_FIX,
        edit=lambda model: model,
        saving_s=lost,
        floor_saving_s=lost,
    )


def _name(trace: Trace) -> str:
    return str(trace.rank) if trace.rank is not None else trace.source


def compute_s(trace: Trace) -> float:
    """Time per step in which a rank computes anything but collectives: what its steps launched, whenever it ran."""
    found = steps.find(trace)
    talks = np.array([kernel_family(name)[0] == "communication" for name in trace.names], dtype=bool)
    rows = device_rows(attribute(trace), found)
    rows = rows[~talks[trace.name[rows]]]
    return intervals.length(intervals.union(*trace.span_s(rows))) / found.count


_FIX = """\
# give every rank the same work: batches of equal tokens rather than of equal rows, experts balanced, no rank-0 extras
# in the step; `nvidia-smi` shows a GPU with a lower clock"""

RANK_IMBALANCE = Rule(id="rank-imbalance", check=check)
