"""data-loading: the step waits for its next batch."""

from __future__ import annotations

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.work import LOADING
from sublight.fix.cure.workers import WORKERS
from sublight.trace.record import Kind


def check(case: Case) -> Change | None:
    before_s = case.model.before_s["data"]
    per_step_s = float(before_s.sum()) / case.model.steps
    if per_step_s <= 0:
        return None
    trace = case.trace
    rows = trace.rows_named(lambda name: name.startswith(LOADING))
    rows = rows[trace.kind[rows] == Kind.RANGE]
    workers = any("MultiProcessing" in trace.name_of(row) for row in rows[:50].tolist())
    how = "its workers are too slow" if workers else "it runs in the step's own process (num_workers=0)"
    return Change(
        title=f"the step waits {units.text(per_step_s, 's')} for its next batch: {how}",
        evidence=(
            f"DataLoader.__next__ takes {units.text(per_step_s, 's')} of a step of {units.text(case.step_s, 's')}",
            f"the device was idle meanwhile for {units.text(case.split.parts['data'], 's')} a step",
        ),
        fix=_MORE if workers else _WORKERS,
        cure="" if workers else WORKERS.line,
        edit=lambda model: model.without("data"),
        rows=case.inside(rows),
    )


_WORKERS = """\
DataLoader(dataset, batch_size=..., num_workers=8, pin_memory=True, persistent_workers=True, prefetch_factor=4)
# work that is the same every epoch (decoding, tokenising) is better done once and kept"""
_MORE = """\
DataLoader(..., num_workers=2 * old, prefetch_factor=4, persistent_workers=True)
# or cheaper items: decode and resize once and keep the result, collate tensors instead of lists"""

DATA_LOADING = Rule(id="data-loading", check=check)
