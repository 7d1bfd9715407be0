"""data-loading: the step waits for its next batch."""

from __future__ import annotations

import re

from sublight import units
from sublight.diagnose import python, python_advice, trainer
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.source import text_of
from sublight.diagnose.work import LOADING
from sublight.fix.cure.workers import WORKERS
from sublight.trace.record import Kind, Trace

MOST_WORKERS = 16  # beyond, workers wait for the disk and for each other
USUAL_WORKERS = 4  # where the trace does not say how many cores there were
LEAST = 0.2  # of the loading time, for a function to be named


def check(case: Case) -> Change | None:
    before_s = case.model.before_s["data"]
    per_step_s = float(before_s.sum()) / case.model.steps
    if per_step_s <= 0:
        return None
    trace = case.trace
    rows = trace.rows_named(lambda name: name.startswith(LOADING))
    rows = rows[trace.kind[rows] == Kind.RANGE]
    workers = any("MultiProcessing" in trace.name_of(row) for row in rows[:50].tolist())
    restarts_s = min(python.spent(case, python.starts_workers).seconds, per_step_s) if workers else 0.0
    how = "its workers are too slow" if workers else "it runs in the step's own process (num_workers=0)"
    hot = [spot for spot in python.spots(case, in_loader=True) if spot.share >= LEAST] if not workers else []
    if restarts_s > per_step_s / 2:
        how = "most of it for workers that start anew"
    return Change(
        title=f"the step waits {units.text(per_step_s, 's')} for its next batch: {how}",
        evidence=(
            f"DataLoader.__next__ takes {units.text(per_step_s, 's')} of a step of {units.text(case.step_s, 's')}",
            f"the device was idle meanwhile for {units.text(case.split.parts['data'], 's')} a step",
            *(
                f"{spot.function}() in {spot.file}:{spot.line} {python_advice.kind_of(spot, trace).does}: "
                f"{units.percent(spot.share)} of the loading"
                for spot in hot[:2]
            ),
        ),
        fix=_fix(case, workers) + (_BY_ROW if hot and _by_element(hot[0], trace) else ""),
        cure="" if workers or trainer.runs(case.trace) else WORKERS.line,
        edit=lambda model: model.without("data"),
        most_s=per_step_s - restarts_s,  # the rest is another finding's
        rows=case.inside(rows),
        at=tuple((spot.place, f"{units.percent(spot.line_share)} of the loading") for spot in hot[:2]),
    )


def _by_element(spot: python.Spot, trace: Trace) -> bool:
    """Whether its line sets one element in a loop, as `out[row, column] = value`."""
    line = text_of(trace, spot.file, spot.line)
    return bool(re.match(r"\s*[\w.]+(\[[^\]:]+\])+\s*=(?!=)", line)) and python_advice.in_a_loop(spot, trace)


def workers_here(case: Case) -> int:
    """Workers to advise: the cores that the script had when it was recorded, less the one that runs the steps."""
    cores = case.trace.meta.get("cores_to_use") or case.trace.meta.get("cores")
    return max(1, min(cores - 1, MOST_WORKERS)) if isinstance(cores, int) and cores > 0 else USUAL_WORKERS


def _fix(case: Case, workers: bool) -> str:
    count = workers_here(case)
    if trainer.runs(case.trace):
        return f"TrainingArguments(..., dataloader_num_workers={count})\n{_ONCE}"
    options = f"num_workers={count}, prefetch_factor=4"
    if workers:
        return f"# one worker a core to spare, no more: {count} here\nDataLoader(..., {options})\n{_CHEAPER}"
    pinned = ", pin_memory=True" if case.on_gpu else ""
    return f"DataLoader(dataset, batch_size=..., {options}{pinned})\n{_ONCE}"


_ONCE = "# work that is the same every epoch (decoding, tokenising) is better done once and kept"
_BY_ROW = """
# and a batch that is filled element by element, row by row:
batch = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)"""
_CHEAPER = (
    "# with as many already, cheaper items: decode and resize once and keep the result, "
    "collate tensors instead of lists"
)

DATA_LOADING = Rule(id="data-loading", check=check)
