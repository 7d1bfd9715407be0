"""What each rank of a run does in a step: its own work, and its time in collectives, waiting included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sublight.diagnose.case import Case
from sublight.diagnose.model import TALKING
from sublight.diagnose.work import device_rows
from sublight.trace import communication, intervals, steps
from sublight.trace.attribute import attribute
from sublight.trace.record import Kind, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Per step."""

    trace: Trace
    compute_s: float
    talk_s: float


def ranks(case: Case) -> list[Rank]:
    """The explained one first."""
    return [of(trace) for trace in (case.trace, *case.others)]


def of(trace: Trace) -> Rank:
    """What the rank's steps launched, whenever it ran; on a CPU, its ops."""
    found = steps.find(trace)
    if trace.on_gpu:
        rows = device_rows(attribute(trace), found)
        talks = communication.named(trace)[trace.name[rows]]
    else:
        rows = trace.of_kind(Kind.OP, Kind.RANGE)
        rows = rows[(trace.start_ns[rows] >= found.spans_ns[0][0]) & (trace.end_ns[rows] <= found.spans_ns[-1][1])]
        names = np.array([name.startswith(TALKING) for name in trace.names], dtype=bool)
        talks = names[trace.name[rows]]
        rows, talks = rows[talks | (trace.kind[rows] == Kind.OP)], talks[talks | (trace.kind[rows] == Kind.OP)]
    talking = intervals.union(*trace.span_s(rows[talks]))
    work = intervals.union(*trace.span_s(rows[~talks]))
    if not trace.on_gpu:
        work = intervals.subtract(work, talking)
    return Rank(
        trace=trace,
        compute_s=intervals.length(work) / found.count,
        talk_s=intervals.length(talking) / found.count,
    )
