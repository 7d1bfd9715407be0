"""A few steps of a trace: what belongs to them, what is left of the step before, what is not theirs."""

from __future__ import annotations

import pytest

from sublight.diagnose.fakes import Machine
from sublight.trace import cut, steps
from sublight.trace.attribute import attribute
from sublight.trace.record import NONE, Trace


def queued(count: int = 4) -> Trace:
    """Steps whose work the device does later, most of it after the last: 7 events of each while the steps run."""
    machine = Machine()
    for number in range(count):
        with machine.step():
            for _ in range(3):
                machine.op(f"aten::op{number}", (64, 64), us=200.0, kernel=f"kernel{number}")
    return machine.trace()


def names(trace: Trace, *, launched: bool) -> set[str]:
    launch = attribute(trace).launch
    return {trace.name_of(row) for row in trace.device_rows.tolist() if (launch[row] != NONE) == launched}


def test_what_the_steps_launched_is_theirs_and_no_more() -> None:
    trace = queued()
    spans = steps.find(trace).spans_ns
    part = cut.cut(trace, spans[1][0], spans[2][1])
    assert names(part, launched=True) == {"kernel1", "kernel2"}
    assert names(part, launched=False) == {"kernel0"}, "the device was still at it: as at the start of a recording"
    assert "aten::op3" not in {part.name_of(row) for row in range(len(part))}
    assert part.start_ns.min() >= 0 and part.duration_ns <= trace.duration_ns, "the same clock"


def test_a_call_that_reaches_into_the_steps_is_not_theirs() -> None:
    machine = Machine()
    with machine.step():
        machine.launch("before", 10.0, blocking=True)
    begin = round(1000 * (machine.now - 5.0))  # inside the call, and inside its kernel
    with machine.step():
        machine.launch("within", 10.0)
    part = cut.cut(machine.trace(), begin, round(1000 * machine.now))
    assert (names(part, launched=True), names(part, launched=False)) == ({"within"}, {"before"})


@pytest.mark.parametrize(("most_rows", "count"), [(10**6, 40), (100, 14), (1, 3)])
def test_as_many_steps_as_there_is_room_for(most_rows: int, count: int) -> None:
    trace = queued(40)
    assert cut.typical(trace, steps.find(trace), most_rows).count == count


def test_a_slow_start_counts_for_nothing_and_what_a_step_in_ten_does_for_a_tenth() -> None:
    machine = Machine()
    for number in range(60):
        with machine.step():
            machine.python(5000.0 if number < 3 else 1000.0 if number % 10 == 0 else 100.0)
            machine.lookups(10, us=5.0)
    trace = machine.trace()
    found = steps.find(trace)
    chosen = cut.typical(trace, found, len(trace) // 3)
    mean_us = sum(end - start for start, end in chosen.spans_ns) / chosen.count / 1000
    assert chosen.count == 20
    assert mean_us == pytest.approx(80 + (18 * 100 + 2 * 1000) / 20, rel=0.01)
