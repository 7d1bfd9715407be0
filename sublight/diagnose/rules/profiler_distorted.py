"""profiler-distorted: the profiler's own cost is a good part of what the trace shows."""

from __future__ import annotations

from sublight import units
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.unprofiled import has_stacks, unprofiled_s

LEAST = 0.1  # of the step


def check(case: Case) -> Change | None:
    if unprofiled_s(case.trace):
        return None  # the figures are corrected by it, and a note says so
    extra_s = case.profiled_step_s - case.step_s
    if not has_stacks(case.trace) or extra_s < LEAST * case.profiled_step_s:
        return None
    return Change(
        title=f"about {units.text(extra_s, 's')} of the traced step are the profiler's own: stacks were recorded",
        evidence=(
            f"{case.per_step(float(case.model.torch_events.sum())):.0f} ops and calls recorded a step",
            "an estimate: 2 to 4.5 µs an event, 0.7 µs a Python function; the other savings are counted without it",
        ),
        fix=_FIX,
        edit=lambda model: model,
        saving_s=extra_s,
    )


_FIX = """\
torch.profiler.profile(..., with_stack=False, record_shapes=True)   # or let `sublight explain script.py` do it"""

PROFILER_DISTORTED = Rule(id="profiler-distorted", check=check)
