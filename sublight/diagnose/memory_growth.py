"""Whether memory grows from step to step: the log of the allocator, over the recorded steps."""

from __future__ import annotations

import numpy as np

from sublight import units
from sublight.diagnose.case import Case
from sublight.trace.record import NONE

FEWEST = 3  # steps
LEAST_BYTES = 1 << 20  # a step
ALIKE = 0.5  # of the middle step's growth, in each of them


def growth_bytes(case: Case) -> int:
    """What memory grows by in each step; 0 where it does not grow in all of them, by much the same."""
    memory, spans = case.trace.memory, case.steps.spans_ns
    if memory is None or len(spans) < FEWEST:
        return 0
    on = memory.device != NONE if case.on_gpu else memory.device == NONE
    total = np.concatenate(([0], np.cumsum(memory.delta_bytes[on])))
    edges = np.searchsorted(memory.time_ns[on], [*(start for start, _ in spans), spans[-1][1]])
    grown = np.diff(total[edges])
    middle = float(np.median(grown))
    return int(middle) if middle >= LEAST_BYTES and grown.min() >= ALIKE * middle else 0


def words(case: Case) -> str:
    """A sentence for the notes; empty where memory does not grow."""
    if not (grown := growth_bytes(case)):
        return ""
    return (
        f"Memory grows by {units.text(grown, 'B')} in each step: something holds on to what a step made. A loss that "
        "is summed up keeps its whole graph: total += loss.item(), or loss.detach(); a list keeps its tensors."
    )
