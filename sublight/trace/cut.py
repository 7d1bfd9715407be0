"""A few steps of a long trace, as a trace: what their host threads did, and what that started on the device."""

from __future__ import annotations

import dataclasses

import numpy as np

from sublight.trace.intervals import middle
from sublight.trace.record import NONE, ON_DEVICE, Ints, Kind, Mask, Trace
from sublight.trace.steps import Steps

MOST_ROWS = 60_000  # that are explained; Python frames are not counted
LEAST_STEPS = 3
COLUMNS = (
    *("kind", "name", "lane", "detail", "start_ns", "end_ns"),
    *("correlation", "external", "sequence", "bytes", "graph_node"),
)


def typical(trace: Trace, found: Steps, most_rows: int = MOST_ROWS) -> Steps:
    """All steps where they are few; else as many in a row as `most_rows` allows: of all such stretches the one whose
    mean is in the middle, so that a slow start counts for nothing and what a step in ten does counts for a tenth.
    """
    counted = trace.start_ns[trace.kind != Kind.PYTHON]
    begins = np.array([start for start, _ in found.spans_ns])
    inside = np.diff(np.searchsorted(counted, [*begins.tolist(), found.spans_ns[-1][1]]))
    total = int(inside.sum())
    count = max(LEAST_STEPS, int(found.count * most_rows / max(total, 1)))
    if total <= most_rows or count >= found.count:
        return found
    lengths = np.array([end - start for start, end in found.spans_ns], dtype=np.float64)
    sums = np.concatenate(([0.0], np.cumsum(lengths)))
    means = (sums[count:] - sums[:-count]) / count
    first = int(np.argmin(np.abs(means - middle(means))))
    return dataclasses.replace(found, spans_ns=found.spans_ns[first : first + count])


def cut(trace: Trace, begin_ns: int, end_ns: int) -> Trace:
    """What overlaps this time on the host, and what it launched; times stay those of the whole trace.

    Work that an earlier step left on the device is kept without its launch, as at the start of a recording.
    """
    on_device = trace.is_kind(*ON_DEVICE, Kind.DEVICE_RANGE, Kind.SYNC)
    overlaps = (trace.start_ns < end_ns) & (trace.end_ns > begin_ns)
    calls = np.flatnonzero(overlaps & (trace.kind == Kind.RUNTIME) & (trace.start_ns >= begin_ns))
    launched = np.zeros(len(trace), dtype=bool)
    numbers = trace.correlation[calls]
    launched[on_device] = np.isin(trace.correlation[on_device], numbers[numbers != NONE])
    last_ns = int(trace.end_ns[launched].max(initial=end_ns))
    unlaunched = on_device & (trace.start_ns < last_ns) & (trace.end_ns > begin_ns) & ~_launched_later(trace, end_ns)
    early = (trace.kind == Kind.RUNTIME) & (trace.start_ns < begin_ns)  # its kernels are of before
    rows: Ints = np.flatnonzero(np.where(on_device, launched | unlaunched, overlaps & ~early))
    return dataclasses.replace(trace, **{name: getattr(trace, name)[rows] for name in COLUMNS})


def _launched_later(trace: Trace, end_ns: int) -> Mask:
    later = np.flatnonzero((trace.kind == Kind.RUNTIME) & (trace.start_ns >= end_ns))
    numbers = trace.correlation[later]
    found: Mask = np.isin(trace.correlation, numbers[numbers != NONE]) & (trace.correlation != NONE)
    return found
