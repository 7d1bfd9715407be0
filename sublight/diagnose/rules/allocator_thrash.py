"""allocator-thrash: memory is asked from the driver and given back inside the step, which stops the device."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.events import WAITS
from sublight.diagnose.model import Model
from sublight.fix.cure.cache import CACHE
from sublight.trace.record import NONE


def check(case: Case) -> Change | None:
    calls = np.flatnonzero(case.model.wait_kind == WAITS.index("allocator"))
    if len(calls) < case.model.steps:
        return None
    rows = case.model.call_row[calls]
    rows = rows[rows != NONE]
    names = Counter(case.trace.name_of(row) for row in rows.tolist())
    spent = float((case.trace.end_ns[rows] - case.trace.start_ns[rows]).sum()) * 1e-9 / case.model.steps
    lines = case.lines(rows.tolist())

    def edit(model: Model) -> Model:
        waits_for, tail, cost = model.waits_for.copy(), model.tail_s.copy(), model.cost_s.copy()
        waits_for[calls], tail[calls], cost[calls] = NONE, 0.0, 0.0
        return model.replace(waits_for=waits_for, tail_s=tail, cost_s=cost)

    return Change(
        title=f"the allocator goes to the driver {case.often(len(calls))} times a step",
        evidence=(
            f"the host waits {units.text(spent, 's')} a step in these calls: "
            + ", ".join(f"{name} ×{case.often(count)}" for name, count in names.most_common(4)),
            *((f"at {lines}",) if lines else ()),
        ),
        fix=_FIX,
        cure=CACHE.line,
        edit=edit,
        rows=rows,
    )


_FIX = """\
# no torch.cuda.empty_cache() in the loop; free a GiB for the cache rather than living at its edge
# where sizes differ from step to step:
#   export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# or pad to a few sizes"""

ALLOCATOR_THRASH = Rule(id="allocator-thrash", check=check)
