"""exposed-communication: collectives that no computation hides."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.model import COMMUNICATION, TALKING, Model
from sublight.trace.record import NONE


def check(case: Case) -> Change | None:
    events = np.flatnonzero(case.model.kind == COMMUNICATION)
    exposed = case.split.parts["communication"]
    if not case.on_gpu and exposed > 0:
        return _on_host(case, exposed)
    if not len(events) or exposed <= 0:
        return None
    total = case.device_s(events)
    rows = case.model.event_row[events]
    names = list(dict.fromkeys(case.trace.name_of(row).partition("(")[0] for row in rows.tolist()))

    def edit(model: Model) -> Model:
        """On a stream of their own, and nothing waits for them before the step's end."""
        stream, after = model.stream.copy(), model.after.copy()
        stream[events] = int(model.stream.max()) + 1
        after[np.isin(after, events)] = NONE
        return model.replace(stream=stream, after=after)

    return Change(
        title=f"{units.text(exposed, 's')} of {units.text(total, 's')} of communication a step run with no kernel "
        "beside them",
        evidence=(
            f"{case.per_step(len(events)):.0f} collectives a step: {', '.join(name[:50] for name in names[:3])}",
        ),
        fix=_FIX,
        edit=edit,
        rows=rows,
    )


def _on_host(case: Case, exposed: float) -> Change:
    rows = case.trace.rows_named(lambda name: name.startswith(TALKING))
    names = list(dict.fromkeys(case.trace.name_of(row) for row in rows.tolist()))
    return Change(
        title=f"the host waits {units.text(exposed, 's')} a step in collectives",
        evidence=(f"{', '.join(name[:50] for name in names[:3])}",),
        fix=_FIX,
        edit=lambda model: model.without("communication"),
        rows=rows,
    )


_FIX = """\
DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)   # overlaps with the backward pass
# with model.no_sync(): on all but the last micro-batch; FSDP: backward_prefetch=BackwardPrefetch.BACKWARD_PRE
# gradients in bfloat16 halve what travels"""

EXPOSED_COMMUNICATION = Rule(id="exposed-communication", check=check)
