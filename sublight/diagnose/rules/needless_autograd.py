"""needless-autograd: the forward pass is recorded for a backward pass that never comes."""

from __future__ import annotations

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.model import Model
from sublight.trace.attribute import ENGINE
from sublight.trace.intervals import distinct
from sublight.trace.record import NONE, Ints, Kind

NODE_S = 0.75e-6  # of the host for an op with a gradient, more than in inference mode: small products on a CPU of 2026


def check(case: Case) -> Change | None:
    rows = nodes(case)
    per_step = case.per_step(len(rows))
    if not per_step:
        return None
    spent_s, launch = per_step * NODE_S, case.model.before_s["launch"]
    share = min(spent_s * case.model.steps / max(float(launch.sum()), 1e-12), 1.0)

    def edit(model: Model) -> Model:
        return model.without("launch", share=share)

    return Change(
        title=f"autograd records {units.count(per_step)} ops a step, and no backward pass runs",
        evidence=(
            f"an op that is recorded costs the host about {units.text(NODE_S, 's')} more",
            "what a backward pass would need stays in memory until the result is gone",
        ),
        fix=_FIX,
        edit=edit,
        rows=rows,
    )


def nodes(case: Case) -> Ints:
    """The ops in the steps that autograd recorded, where it never went back over any of them."""
    trace = case.trace
    if trace.rows_named(lambda name: name.startswith(ENGINE)).size:
        return trace.of_kind()
    ops = case.inside(trace.of_kind(Kind.OP))
    ops = ops[trace.sequence[ops] != NONE]
    # an op has the number of the last node; one that adds a node is followed by the next number
    new = ops[:-1][trace.sequence[ops[1:]] > trace.sequence[ops[:-1]]]
    found: Ints = distinct(new)
    return found


_FIX = """\
with torch.inference_mode():        # or torch.no_grad(), where the results go into a later backward pass
    output = model(batch)"""

NEEDLESS_AUTOGRAD = Rule(id="needless-autograd", check=check)
