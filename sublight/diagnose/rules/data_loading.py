"""data-loading: the step waits for its next batch."""

from __future__ import annotations

import math
import re

import numpy as np

from sublight import units
from sublight.diagnose import python, python_advice, trainer
from sublight.diagnose.case import Case, Change, Rule
from sublight.diagnose.source import text_of
from sublight.diagnose.work import LOADING
from sublight.fix.cure.workers import WORKERS, workers_for
from sublight.trace.record import Ints, Kind, Trace

MOST_WORKERS = 16  # beyond, workers wait for the disk and for each other
USUAL_WORKERS = 4  # where the trace does not say how many cores there were
WORKER_S = 15e-3  # to start a worker and end it: 6 ms of a small process, 28 ms with 1 GB of memory of its own
EPOCH_ENDS = 0.05  # of the usual time for a batch: the call that finds none left takes less
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
    in_epoch, left = (None, 0.0) if workers else _with_workers(case, rows, per_step_s)
    epochs: tuple[str, ...] = ()
    if in_epoch and left > LEAST:
        alone = f"num_workers alone saves {units.percent(1 - left)} of the loading"
        epochs = (f"an epoch has {in_epoch:.0f} batches, and workers start anew for each: {alone}",)
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
            *epochs,
        ),
        fix=_fix(case, workers) + (_SHORT if epochs else "") + (_BY_ROW if hot and _by_element(hot[0], trace) else ""),
        cure="" if workers or trainer.runs(case.trace) else WORKERS.line,
        cures=() if workers else ((WORKERS.name, lambda model: model.without("data", share=1 - left)),),
        edit=lambda model: model.without("data"),
        most_s=per_step_s - restarts_s,  # the rest is another finding's
        rows=case.inside(rows),
        at=tuple((spot.place, f"{units.percent(spot.line_share)} of the loading") for spot in hot[:2]),
    )


def _with_workers(case: Case, rows: Ints, load_s: float) -> tuple[float | None, float]:
    """Batches in an epoch, where one ended in the recording; and the share of the loading that is still waited for when
    workers do it: they make a batch in as long as the step's own process does, and each epoch starts them and waits for
    its first batch.
    """
    took_s = (case.trace.end_ns[rows] - case.trace.start_ns[rows]) * 1e-9
    ends = int(np.count_nonzero(took_s < EPOCH_ENDS * np.median(took_s))) if len(rows) else 0
    in_epoch = (len(rows) - ends) / ends if ends else None
    cores = _cores(case.trace)
    workers = workers_for(cores) if cores else USUAL_WORKERS
    step_s = case.replayed_s(case.model.without("data"))
    waits_s = max(load_s / workers - step_s, 0.0)
    if in_epoch:  # the last batch is there after so many rounds of all workers, the first one after one
        rounds = math.ceil(in_epoch / workers)
        waits_s = (workers * WORKER_S + max(load_s, rounds * load_s - (in_epoch - 1) * step_s)) / in_epoch
    return in_epoch, min(waits_s / load_s, 1.0)


def _by_element(spot: python.Spot, trace: Trace) -> bool:
    """Whether its line sets one element in a loop, as `out[row, column] = value`."""
    line = text_of(trace, spot.file, spot.line)
    return bool(re.match(r"\s*[\w.]+(\[[^\]:]+\])+\s*=(?!=)", line)) and python_advice.in_a_loop(spot, trace)


def workers_here(case: Case) -> int:
    """Workers to advise: the cores that the script had when it was recorded, less the one that runs the steps."""
    cores = _cores(case.trace)
    return max(1, min(cores - 1, MOST_WORKERS)) if cores else USUAL_WORKERS


def _cores(trace: Trace) -> int:
    """Those that the script had; 0 where the trace does not say."""
    cores = trace.meta.get("cores_to_use") or trace.meta.get("cores")
    return cores if isinstance(cores, int) and cores > 0 else 0


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
_SHORT = """
# epochs are short, and each starts its workers anew: persistent_workers=True keeps them, where nothing changes the
# dataset from epoch to epoch"""
_CHEAPER = (
    "# with as many already, cheaper items: decode and resize once and keep the result, "
    "collate tensors instead of lists"
)

DATA_LOADING = Rule(id="data-loading", check=check)
