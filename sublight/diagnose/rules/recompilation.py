"""recompilation: torch.compile compiles again inside the steps."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.work import COMPILING
from sublight.trace.record import Kind


def check(case: Case) -> Change | None:
    spent = float(case.model.before_s["compile"].sum()) / case.model.steps
    if spent <= 0:
        return None
    rows = case.trace.rows_named(lambda name: any(word in name for word in COMPILING))
    rows = case.inside(rows[case.trace.is_kind(Kind.OP, Kind.RANGE)[rows]])
    dynamo = case.trace.meta.get("dynamo")
    counted = dynamo.get("compiles_in_window") if isinstance(dynamo, dict) else None
    reasons = dynamo.get("recompile_reasons") if isinstance(dynamo, dict) else None
    texts = [str(reason).strip()[:200] for reason in reasons] if isinstance(reasons, list) else []
    return Change(
        title="the model is compiled again in the steps",
        evidence=(
            f"{case.often(int(np.count_nonzero(case.model.before_s['compile'])))} stretches of compiling a step take "
            f"{units.text(spent, 's')}",
            *((f"{counted} compilations in the steps that were watched",) if counted else ()),
            *(f"because: {reason}" for reason in texts[:2]),
        ),
        fix=_FIX,
        edit=lambda model: model.without("compile"),
        rows=rows,
    )


_FIX = """\
# why: TORCH_LOGS=recompiles python script.py
torch._dynamo.mark_dynamic(x, 1)                 # the dimension that changes
model = torch.compile(model, dynamic=True)       # or pad lengths to a few sizes: 128, 256, 512"""

RECOMPILATION = Rule(id="recompilation", check=check)
