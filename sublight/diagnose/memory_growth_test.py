"""Memory that grows from step to step is said; what comes and goes, or came once, is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from sublight.diagnose import fakes, memory_growth
from sublight.diagnose.explain import explain
from sublight.trace.record import MemoryLog

MB = 1 << 20


def grown(per_step: Sequence[Sequence[int]], device: int = 0) -> int:
    """Of steps of 1 ms with these allocations in each."""
    machine = fakes.Machine()
    for _ in per_step:
        with machine.step():
            machine.lookups(9)
            machine.python(928.0)
    trace = machine.trace()
    each_ns = trace.duration_ns // len(per_step)
    times = [number * each_ns + 1000 * (at + 1) for number, sizes in enumerate(per_step) for at in range(len(sizes))]
    sizes = np.array([size for sizes in per_step for size in sizes], dtype=np.int64)
    none = np.full(len(sizes), -1, dtype=np.int64)
    log = MemoryLog(
        time_ns=np.array(times, dtype=np.int64),
        delta_bytes=sizes,
        allocated_bytes=none,
        reserved_bytes=none,
        device=np.full(len(sizes), device, dtype=np.int64),
    )
    trace = dataclasses.replace(trace, memory=log)
    size = memory_growth.growth_bytes(fakes.case(trace))
    assert any("Memory grows by" in note for note in explain([trace]).notes) == bool(size)
    return size


@pytest.mark.parametrize(
    ("per_step", "size"),
    [
        ([[9 * MB, -6 * MB]] * 4, 3 * MB),
        ([[9 * MB, -9 * MB]] * 4, 0),
        ([[9 * MB], [9 * MB], [], []], 0),  # an optimizer's state, made once
        ([[9 * MB, -6 * MB]] * 2, 0),  # two steps show nothing
    ],
)
def test_growth(per_step: Sequence[Sequence[int]], size: int) -> None:
    assert grown(per_step) == size


def test_of_a_gpus_trace_the_gpus_memory_counts() -> None:
    assert grown([[9 * MB]] * 4, device=-1) == 0
