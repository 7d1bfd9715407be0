"""redundant-cast-or-copy: tensors cast there and back, cloned or made contiguous, between the ops that use them."""

from __future__ import annotations

from collections import Counter

from sublight import units
from sublight.diagnose.case import Case, Change, Rule, drop
from sublight.diagnose.fusion import CASTS

LEAST = 0.02
LONG_S = 5e-6  # a shorter copy is a launch's matter


def check(case: Case) -> Change | None:
    fused = {at for group in case.groups if group.kind in ("norm", "attention", "pointwise") for at in group.items}
    skip = case.in_optimizer
    copies = [
        at
        for at, item in enumerate(case.items)
        if item.name in CASTS and at not in fused and at not in skip and _on_device(case, at)
    ]
    events = case.events(copies)
    spent = case.device_s(events) if len(events) else 0.0
    if spent < LEAST * case.step_s:
        return None
    sizes = [case.items[at].cost for at in copies]
    moved = sum(cost.bytes for cost in sizes if cost) / case.model.steps
    users = Counter(_user_name(case, case.items[at].row) for at in copies)
    lines = case.lines([case.items[at].row for at in copies][:200])
    return Change(
        title=f"{case.often(len(copies))} casts and copies a step compute nothing",
        evidence=(
            f"{units.text(spent, 's')} a step" + (f" to move {units.text(moved, 'B')}" if moved else ""),
            "by: " + ", ".join(f"{name} ×{case.often(count)}" for name, count in users.most_common(4)),
            *((f"at {lines}",) if lines else ()),
        ),
        fix=_FIX,
        edit=lambda model: drop(model, events),
        most_s=spent,
        rows=case.model.event_row[events],
        ops=tuple(users),
    )


def _on_device(case: Case, at: int) -> bool:
    """Within the device, and not just a few bytes."""
    rows = case.items[at].rows
    if float(case.model.duration_s[case.events_of[at]].sum()) < LONG_S:
        return False
    return not case.on_gpu or not any(
        case.trace.name_of(row).startswith(("Memcpy HtoD", "Memcpy DtoH")) for row in rows
    )


def _user_name(case: Case, row: int) -> str:
    chain = case.attribution.ops_above(row)
    inner = [case.trace.name_of(op) for op in chain if case.trace.name_of(op) in CASTS]
    return inner[-1] if inner else case.trace.name_of(row)


_FIX = """\
# keep one dtype and one layout from op to op
x = x.to(torch.bfloat16)                 # once, at the start, not around every layer
y = x.transpose(1, 2)                    # most ops take strided input: no .contiguous(), no .clone()
# copies that are kept (deepcopy of a state_dict, clone): not in every step, or into a buffer, with copy_"""

REDUNDANT_CAST_OR_COPY = Rule(id="redundant-cast-or-copy", check=check)
