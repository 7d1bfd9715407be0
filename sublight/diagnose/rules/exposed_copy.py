"""exposed-copy: copies from pinned memory that nothing hides."""

from __future__ import annotations

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.rules.pageable_copy import link_copies, overlapped

LEAST = 0.02


def check(case: Case) -> Change | None:
    events = link_copies(case, "Pinned")
    if not len(events) or case.split.parts["copy"] + case.split.parts["sync"] < LEAST * case.step_s:
        return None
    rows = case.model.event_row[events]
    size, seconds = case.per_step(int(case.trace.bytes[rows].sum())), case.device_s(events)
    lines = case.lines(rows.tolist())
    return Change(
        title=f"copies of {units.text(size, 'B')} a step run with no kernel beside them",
        evidence=(
            f"{case.often(len(events))} copies a step take {units.text(seconds, 's')}, at "
            f"{units.text(size / seconds if seconds else None, 'B/s')}; alone for "
            f"{units.text(case.split.parts['copy'], 's')} of it",
            *((f"at {lines}",) if lines else ()),
        ),
        fix=_FIX,
        edit=overlapped(case, events),
        rows=rows,
    )


_FIX = """\
copies = torch.cuda.Stream()
with torch.cuda.stream(copies):                          # a step ahead, beside the compute stream
    following = host_batch.to(device, non_blocking=True)
...                                                      # this step's work
torch.cuda.current_stream().wait_stream(copies)"""

EXPOSED_COPY = Rule(id="exposed-copy", check=check)
