"""exposed-communication: collectives that no computation hides."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.model import COMMUNICATION, TALKING, Model
from sublight.diagnose.ranks import ranks
from sublight.diagnose.record import BUSY
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

    waiting = _waiting_s(case)
    return Change(
        title=f"{units.part_of(exposed, total, 's')} of communication a step are hidden by no kernel",
        evidence=(
            f"{case.often(len(events))} collectives a step: {', '.join(name[:50] for name in names[:3])}",
            *((f"{units.text(waiting, 's')} a step of it are spent waiting for slower ranks",) if waiting else ()),
            *_too_long(case, total),
        ),
        fix=_FIX,
        edit=edit,
        most_s=max(exposed - waiting, 0.0),
        rows=rows,
    )


def _waiting_s(case: Case) -> float:
    """What of the time in collectives other ranks do not have: it is waited for, not sent."""
    if not case.others:
        return 0.0
    here, *others = ranks(case)
    return max(here.talk_s - min((rank.talk_s for rank in others), default=here.talk_s), 0.0)


def _too_long(case: Case, total: float) -> tuple[str, ...]:
    """Where there is not enough work to hide it behind."""
    work = sum(case.split.parts[name] for name in BUSY)
    if total <= work:
        return ()
    return (
        f"it takes longer than the {units.text(work, 's')} of work a step that could hide it: send less, or a larger "
        "batch a rank",
    )


def _on_host(case: Case, exposed: float) -> Change:
    rows = case.trace.rows_named(lambda name: name.startswith(TALKING))
    names = list(dict.fromkeys(case.trace.name_of(row) for row in rows.tolist()))
    waiting = _waiting_s(case)
    sent, other_s = max(exposed - waiting, 0.0), max(case.step_s - exposed, 0.0)  # all else, which it could run beside
    least = "in bfloat16, and beside all else in the step, it would still take"
    return Change(
        title=f"the host waits {units.text(exposed, 's')} a step in collectives",
        evidence=(
            f"collectives: {', '.join(name[:50] for name in names[:3])}",
            *((f"{units.text(waiting, 's')} a step of it are spent waiting for slower ranks",) if waiting else ()),
            *((f"{least} {units.text(sent / 2, 's')}",) if sent / 2 > other_s else ()),
        ),
        fix=_FIX,
        edit=lambda model: model.without("communication"),
        most_s=min(sent, sent / 2 + other_s),
        rows=rows,
    )


_FIX = """\
DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)   # overlaps with the backward pass
# with model.no_sync(): on all but the last micro-batch; FSDP: backward_prefetch=BackwardPrefetch.BACKWARD_PRE
# gradients in bfloat16 halve what travels"""

EXPOSED_COMMUNICATION = Rule(id="exposed-communication", check=check)
