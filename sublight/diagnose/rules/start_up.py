"""start-up: the recording holds what happens once, at first use: contexts, streams, the code of each kernel."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.model import start_up
from sublight.diagnose.work import of_device

LEAST = 0.02


def check(case: Case) -> Change | None:
    spent = float(case.model.before_s["start_up"].sum()) / case.model.steps
    if spent < LEAST * case.step_s:
        return None
    calls = case.model.call_row[case.model.call_row >= 0]
    rows = start_up(case.trace, calls, of_device(case.trace, case.model.event_row), case.steps)
    lengths = case.trace.end_ns[rows] - case.trace.start_ns[rows]
    longest = rows[np.argsort(-lengths, kind="stable")][:3].tolist()
    names = Counter(case.trace.name_of(row) for row in rows.tolist())
    return Change(
        title=f"{units.text(spent, 's')} of the step is start-up, which happens once and not in every step",
        evidence=(
            "calls that brought something up: " + ", ".join(f"{name} ×{n}" for name, n in names.most_common(4)),
            *(_line(case, row) for row in longest),
        ),
        fix=_FIX,
        edit=lambda model: model.without("start_up"),
        rows=rows,
    )


def _line(case: Case, row: int) -> str:
    length_s = float(case.trace.end_ns[row] - case.trace.start_ns[row]) * 1e-9
    chain = case.attribution.ops_above(row)
    inside = f" in {case.trace.name_of(chain[-1])[:60]}" if chain else ""
    return f"{case.trace.name_of(row)} took {units.text(length_s, 's')}{inside}"


_FIX = """\
# record steps that come later, and judge those:
torch.profiler.profile(schedule=torch.profiler.schedule(wait=5, warmup=3, active=5), ...)   # and prof.step() each step
# or let `sublight explain script.py` choose them"""

START_UP = Rule(id="start-up", check=check)
