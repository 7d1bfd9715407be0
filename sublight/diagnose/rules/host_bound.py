"""host-bound: Python on the critical path, with no torch op running."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.trace.record import NONE


def check(case: Case) -> Change | None:
    before_s = case.model.before_s["python"]
    per_step_s = float(before_s.sum()) / case.model.steps
    if per_step_s <= 0:
        return None
    longest = np.argsort(before_s)[::-1][:5]
    longest = longest[before_s[longest] > 0]
    rows = case.model.call_row[longest]
    rows = rows[rows != NONE]
    stretches = np.count_nonzero(before_s) / case.model.steps
    lines = case.lines(rows.tolist())
    return Change(
        title=f"Python outside of torch takes {units.text(per_step_s, 's')} of each step",
        evidence=(
            f"{stretches:.1f} stretches a step in which no op ran, up to {units.text(float(before_s.max()), 's')}",
            *((f"the longest end at {lines}",) if lines else ()),
        ),
        fix=_FIX,
        edit=lambda model: model.without("python"),
        rows=rows,
    )


_FIX = """\
# do it once, before the loop; or with tensor ops on the device; or in DataLoader workers
positions = torch.arange(length, device=device)   # not: torch.tensor([... for ... in ...])
# which lines: python -m cProfile -s cumulative script.py"""

HOST_BOUND = Rule(id="host-bound", check=check)
