"""unfused-pointwise: chains of elementwise ops, each of which reads and writes the whole tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sublight import units
from sublight.diagnose.case import Case, Change, Rule, fuse
from sublight.diagnose.fusion import Kind
from sublight.fix.cure.pointwise import POINTWISE

LEAST = 0.01


def check(case: Case) -> Change | None:
    return propose(case, "pointwise", _title, _FIX, POINTWISE.line)


def propose(
    case: Case, kind: Kind, title: Callable[[float, float, float, float], str], fix: str, cure: str = ""
) -> Change | None:
    """A change that makes one kernel of each group of this kind; the cure is one of kernels, which a CPU has not."""
    skip = case.in_optimizer
    groups = [group for group in case.groups if group.kind == kind and not skip & set(group.items)]
    parts = [(case.events(group.items), group.fused_s) for group in groups]
    parts = [(events, seconds) for events, seconds in parts if len(events)]
    if not parts:
        return None
    spent = sum(case.device_s(events) for events, _ in parts)
    fused = sum(min(case.device_s(events), case.per_step(seconds)) for events, seconds in parts)
    if spent - fused < LEAST * case.step_s:
        return None
    names = Counter(case.items[at].name for group in groups for at in group.items)
    ops = tuple(name for name, _ in names.most_common(6))
    members = [at for group in groups for at in group.items]
    rows = [case.items[at].row for at in members]
    lines = case.lines(rows[:200])
    return Change(
        title=title(len(members) / case.model.steps, len(groups) / case.model.steps, spent, fused),
        evidence=(
            "ops: " + ", ".join(f"{name} ×{count / case.model.steps:.0f}" for name, count in names.most_common(6)),
            f"as they are {units.text(spent, 's')} a step; as one kernel each about {units.text(fused, 's')}",
            *((f"at {lines}",) if lines else ()),
        ),
        fix=fix,
        cure=cure if case.on_gpu else "",
        edit=fuse(parts),
        rows=tuple(int(row) for events, _ in parts for row in case.model.event_row[events].tolist()),
        ops=ops,
    )


def _title(ops: float, groups: float, spent: float, fused: float) -> str:
    return (
        f"{ops:.0f} memory-bound ops a step in {groups:.0f} chain{'s' if groups > 1 else ''} take "
        f"{units.text(spent, 's')}: each reads and writes its whole tensor; fused, about {units.text(fused, 's')}"
    )


_FIX = """\
model = torch.compile(model)             # or only the function with the chain:
@torch.compile
def activation(x, bias): ...             # and use F.gelu, F.silu, torch.addcmul where they say the same"""

UNFUSED_POINTWISE = Rule(id="unfused-pointwise", check=check)
