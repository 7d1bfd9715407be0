"""float64-by-accident: work in double precision, as NumPy's arrays bring it in: twice the bytes, slower arithmetic."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.cost import Cost
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.work import Item

LEAST = 0.02  # of the step


def check(case: Case) -> Change | None:
    wide = [at for at, item in enumerate(case.items) if item.dtype == "float64"]
    share = float(case.split.busy_s[wide].sum()) / case.step_s
    if share < LEAST:
        return None
    factor = np.ones(len(case.model.event_row))
    for at in wide:
        factor[case.events_of[at]] = _in_float32(case, case.items[at])
    rows = case.model.event_row[case.events(wide)]
    names = tuple(dict.fromkeys(case.items[at].name for at in wide))
    return Change(
        title=f"ops in float64 take {units.percent(share)} of the step",
        evidence=(
            f"{case.often(len(wide))} ops a step work in float64: {', '.join(names[:6])}",
            "the first ones say where it comes in: a NumPy array, a .double(), a default dtype",
        ),
        fix=_FIX,
        edit=lambda model: model.replace(duration_s=model.duration_s * factor),
        rows=rows,
        ops=names[:6],
    )


def _in_float32(case: Case, item: Item) -> float:
    """Of its time: by its floor with half the bytes and float32's arithmetic."""
    limits, cost = case.limits, item.cost
    if cost is None:
        return 1.0
    flops = {name.replace("fp64", "fp32"): count for name, count in cost.flops.items()}
    half = Cost(read_bytes=cost.read_bytes // 2, write_bytes=cost.write_bytes // 2, flops=flops)
    before, after = limits.floor(cost), limits.floor(half)
    return min(after.seconds / before.seconds, 1.0) if before and after and before.seconds else 1.0


_FIX = """\
x = torch.from_numpy(array).float()        # NumPy's numbers are float64; or array.astype(numpy.float32), once
model = model.float()                      # not .double(), nor torch.set_default_dtype(torch.float64)
# where float64 is meant (an ODE, a sum of many), keep it for that part alone"""

FLOAT64 = Rule(id="float64-by-accident", check=check)
