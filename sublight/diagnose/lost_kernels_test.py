"""Steps whose device events are lost, or cannot be joined with their launches."""

from __future__ import annotations

import dataclasses

import numpy as np

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
