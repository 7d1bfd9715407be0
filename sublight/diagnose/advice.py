"""When torch.compile is no advice: where it is known to lose, or was seen to.

Measured on an H200 (benchmarks/explain_fix_h200.json): where fusing chains would save 1 % of a step, compiling cost
9 %; where 13 %, it brought 3 %.
"""

from __future__ import annotations

from sublight.diagnose.case import Case
from sublight.trace.record import Kind

LEAST_SHARE = 0.03  # of the step that fusion must save, for a compiled model's guards and calls to pay
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "triton_poi_", "triton_red_", "triton_per_")
MOST_COMPARED = 2000  # ops of a step, whose shapes are held against another step's


def no_compiling(case: Case, saving_s: float = float("inf")) -> str:
    """Why compiling the model is no advice here; empty where it is."""
    if not case.on_gpu:
        return "on a CPU, compiling takes longer than it saves in most scripts"
    if case.trace.rows_named(lambda name: name.startswith(_COMPILED)).size:
        return "the model is compiled already"
    if saving_s < LEAST_SHARE * case.step_s:
        return "for so little, a compiled model's own overhead costs more than fusion saves"
    if shapes_change(case):
        return "shapes differ from step to step, so it would compile again and again"
    return ""


def shapes_change(case: Case) -> bool:
    """Whether the same ops got other shapes in another step."""
    trace, spans = case.trace, case.steps.spans_ns
    if len(spans) < 2:
        return False
    tops = case.attribution.top_ops
    tops = tops[trace.kind[tops] == Kind.OP]
    lists = []
    for start, end in (spans[-2], spans[-1]):
        rows = tops[(trace.start_ns[tops] >= start) & (trace.start_ns[tops] < end)][:MOST_COMPARED]
        lists.append([(int(trace.name[row]), trace.detail_of(row).dims) for row in rows.tolist()])
    before, after = lists
    if not before or [name for name, _ in before] != [name for name, _ in after]:
        return False
    return sum(one != other for one, other in zip(before, after, strict=True)) > 0.1 * len(before)
