"""Steps whose device events are lost, cannot be joined with their launches, or have another clock."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sublight.diagnose.explain import explain
from sublight.diagnose.fakes import Machine
from sublight.diagnose.record import NOT_JUDGED
from sublight.trace import cut
from sublight.trace.record import NONE, Kind


def test_steps_whose_kernels_the_file_has_not_are_no_python() -> None:
    """Device events stand at the end of a file: where they are lost, or numbers join nothing, that is said."""
    machine = Machine()
    for _ in range(4):
        with machine.step():
            machine.lookups(10)
    trace = machine.trace(tool="kineto")
    last = trace.rows_named(lambda name: name == "ProfilerStep#4")
    lost = np.isin(trace.kind, (Kind.KERNEL, Kind.RUNTIME)) & (trace.start_ns < trace.start_ns[last[0]])
    lost[last] = True  # of a fourth step there is only the device's part
    found = explain([dataclasses.replace(trace, **{name: getattr(trace, name)[~lost] for name in cut.COLUMNS})])
    assert (found.verdict, found.unsure, found.steps) == (NOT_JUDGED, True, 3)
    assert "host's side of the steps" in found.sentence and found.breakdown["python"] == 0.0

    shared = explain([dataclasses.replace(trace, correlation=np.where(trace.correlation == NONE, NONE, 7))])
    assert shared.unsure and any("launches in the steps, 40 have no kernel" in caveat for caveat in shared.caveats)


@pytest.mark.parametrize(("shift_ms", "words"), [(300, "long after"), (-300, "before"), (0, "")])
def test_a_device_with_a_clock_of_its_own_is_doubted(shift_ms: int, words: str) -> None:
    machine = Machine()
    for _ in range(4):
        with machine.step():
            machine.python(20_000.0)
            machine.lookups(10)
            machine.sync()
    trace = machine.trace(tool="kineto")
    shift = np.where(trace.kind == Kind.KERNEL, shift_ms * 1_000_000, 0) + 400_000_000
    moved = {name: getattr(trace, name) + shift for name in ("start_ns", "end_ns")}
    order = np.argsort(moved["start_ns"], kind="stable")
    columns = {name: getattr(trace, name)[order] for name in cut.COLUMNS}
    columns |= {name: column[order] for name, column in moved.items()}
    found = explain([dataclasses.replace(trace, **columns)])
    caveats = [caveat for caveat in found.caveats if "clock" in caveat]
    assert bool(caveats) == bool(words) and all(f"{words} their launch" in caveat for caveat in caveats)
    assert found.unsure or not words
