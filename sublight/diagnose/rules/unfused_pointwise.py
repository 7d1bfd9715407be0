"""unfused-pointwise: chains of elementwise ops, each of which reads and writes the whole tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from sublight import units
from sublight.diagnose.advice import no_compiling
from sublight.diagnose.case import Case, Change, Rule, fuse
from sublight.diagnose.fusion import Kind
from sublight.fix.cure.pointwise import POINTWISE

LEAST = 0.01


def check(case: Case) -> Change | None:
    change = propose(case, "pointwise", _title, "", POINTWISE.line)
    if change is None:
        return None
    change = replace(change, fix=by_hand(change.ops))
    against = no_compiling(case, case.saving_s(change.edit))
    if against:
        return replace(change, evidence=(*change.evidence, f"torch.compile is no advice: {against}"))
    return replace(change, fix=_COMPILE + change.fix)


def propose(case: Case, kind: Kind, title: Callable[[float, float], str], fix: str, cure: str = "") -> Change | None:
    """A change that makes one kernel of each group of this kind; the cure is one of kernels, which a CPU has not."""
    skip = case.in_optimizer
    groups = [group for group in case.groups if group.kind == kind and not skip & set(group.items)]
    parts = [(case.events(group.items), group.fused_s) for group in groups]
    parts = [(events, seconds) for events, seconds in parts if len(events)]
    if not parts:
        return None
    spent = min(sum(case.device_s(events) for events, _ in parts), case.step_s)
    fused = min(sum(min(case.device_s(events), case.per_step(seconds)) for events, seconds in parts), spent)
    if spent - fused < LEAST * case.step_s:
        return None
    names = Counter(case.items[at].name for group in groups for at in group.items)
    ops = tuple(name for name, _ in names.most_common(6))
    members = [at for group in groups for at in group.items]
    rows = [case.items[at].row for at in members]
    lines = case.lines(rows[:200])
    return Change(
        title=title(case.per_step(len(members)), case.per_step(len(groups))),
        evidence=(
            f"as they are {units.text(spent, 's')} a step; as one kernel each about {units.text(fused, 's')}",
            "ops: " + ", ".join(f"{name} ×{case.often(count)}" for name, count in names.most_common(6)),
            *((f"at {lines}",) if lines else ()),
        ),
        fix=fix,
        cure=cure if case.on_gpu else "",
        edit=fuse(parts),
        rows=tuple(int(row) for events, _ in parts for row in case.model.event_row[events].tolist()),
        ops=ops,
    )


def _title(ops: float, groups: float) -> str:
    return f"{units.count(ops)} elementwise ops a step each read and write their whole tensor"


_COMPILE = """\
model = torch.compile(model)        # or only the function with the chain; or by hand:
"""
IN_ONE = {  # an op of a chain: what it may be a part of
    "tanh": 'y = F.gelu(x, approximate="tanh")   # one kernel, where the chain is GELU by tanh',
    "erf": "y = F.gelu(x)                       # one kernel, where the chain is GELU by erf",
    "sigmoid": "y = F.silu(x)                       # one kernel, where the chain is x * sigmoid(x)",
    "mul": "y = torch.addcmul(c, a, b)          # one kernel, where the chain is c + a * b",
}
IN_PLACE = "# ops that end in _ (add_, mul_, clamp_) write no other tensor: where nothing else needs the old one"


def by_hand(ops: Iterable[str]) -> str:
    """Code for a chain of these ops, and for no other: pasted where its remark holds, it changes no result."""
    names = {op.removeprefix("aten::").rstrip("_") for op in ops}
    lines = [line for name, line in IN_ONE.items() if name in names and (name != "mul" or "add" in names)]
    return "\n".join((*lines, IN_PLACE))


UNFUSED_POINTWISE = Rule(id="unfused-pointwise", check=check)
