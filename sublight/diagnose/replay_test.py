"""The replay of a model that nobody changed lasts what the traced step lasted, worked out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublight.diagnose import fakes, replay
from sublight.diagnose.fakes import GEMM, PRODUCT, QUEUE, Machine
from sublight.diagnose.model import Model
from sublight.trace.record import Trace

Body = Callable[[Machine], Any]


def steps(body: Body, count: int = 4) -> Trace:
    machine = Machine()
    for _ in range(count):
        with machine.step():
            body(machine)
    return machine.trace()


def products(m: Machine, count: int, us: float, **more: Any) -> None:
    for _ in range(count):
        m.op("aten::mm", *PRODUCT, us=us, kernel=GEMM, **more)


def with_a_sync(m: Machine) -> None:
    products(m, 10, 50.0)
    m.sync(tail_us=20.0)


def on_two_streams(m: Machine) -> None:
    """The second stream waits for the first once, and the first for the second at the end: 50 + 5 × 70 + 50."""
    for _ in range(5):
        products(m, 1, 50.0)
        products(m, 1, 70.0, stream=1, after=0)
    products(m, 1, 50.0, after=1)


def with_a_blocking_copy(m: Machine) -> None:
    m.copy(500.0, 5_000_000, blocking=True)
    products(m, 5, 50.0)


TRACES: dict[str, tuple[Trace, float]] = {
    "host-bound": (steps(lambda m: products(m, 50, 3.0)), 50 * 8),
    "device-bound": (steps(lambda m: products(m, 10, 125.0)), 10 * 125),
    "python": (steps(lambda m: (m.python(3000.0), products(m, 10, 50.0))), 3000 + 80),
    "data": (steps(lambda m: (m.load(3000.0), products(m, 10, 50.0))), 3000 + 80),
    # from the step's start 2.5 to the call, 4 to its kernel
    "sync": (steps(with_a_sync), 6.5 + 500 + 20),
    "two streams": (steps(on_two_streams), 450),
    # 1 from the copy's end to the call's, 2.5 + 4 to the next kernel; then the copy waits for the products
    "blocking copy": (steps(with_a_blocking_copy), 500 + 7.5 + 250),
    "full queue": (steps(lambda m: products(m, 2 * QUEUE, 20.0), 2), 2 * QUEUE * 20),
    "full queue of long kernels": (steps(lambda m: products(m, 2 * QUEUE, 200.0), 2), 2 * QUEUE * 200),
    "one step": (steps(lambda m: products(m, 10, 125.0), 1), 10 * 125),
    "a CPU": (steps(lambda m: (m.python(40.0), m.work("aten::mm", *PRODUCT, us=500.0))), 540),
}


@pytest.mark.parametrize("name", TRACES)
def test_an_unchanged_model_lasts_what_the_trace_lasted(name: str) -> None:
    trace, step_us = TRACES[name]
    model = fakes.case(trace).model
    assert replay.run(model).step_s * 1e6 == pytest.approx(step_us, rel=0.01)


@pytest.mark.parametrize("name", TRACES)
def test_the_settled_part_is_consistent(name: str) -> None:
    model = fakes.case(TRACES[name][0]).model
    ran = replay.run(model)
    assert ran.end_s - ran.start_s == pytest.approx(ran.steps * ran.step_s)
    assert (ran.event_end >= ran.event_start).all()
    order = (ran.host_start, ran.call_start, ran.wait_start, ran.wait_end, ran.call_end)
    assert all((after >= before).all() for before, after in itertools.pairwise(order))
    for stream in np.unique(model.stream):
        mine = model.stream[ran.event] == stream
        assert (ran.event_start[mine][1:] >= ran.event_end[mine][:-1] - 1e-12).all(), "a stream does one at a time"


def test_the_replay_has_the_same_queue_as_a_device() -> None:
    """Without it the host would be a whole step ahead."""
    ran = replay.run(fakes.case(TRACES["full queue"][0]).model)
    last = ran.event_end[-1] - ran.call_end[-1]
    assert last == pytest.approx(QUEUE * 20e-6, rel=0.01)


@pytest.mark.parametrize("name", ["full queue", "full queue of long kernels"])
def test_a_full_queue_holds_nobody_up_once_the_kernels_are_short(name: str) -> None:
    """What the calls waited for room is not the host's own time."""
    model = fakes.case(TRACES[name][0]).model
    faster = replay.run(model.replace(duration_s=np.full(len(model.event_row), 1e-6)))
    assert faster.step_s * 1e6 == pytest.approx(2 * QUEUE * 8, rel=0.01)


def test_repeats_are_even_and_few_where_the_model_is_large() -> None:
    small, large = (fakes.case(TRACES[name][0]).model for name in ("one step", "full queue"))
    assert replay.repeats_of(small) == 8
    assert replay.repeats_of(small.replace(call_row=np.zeros(19_990, dtype=np.int64))) == 2  # three were affordable
    assert replay.repeats_of(large.replace(call_row=np.zeros(60_000, dtype=np.int64))) == 2


kernels = st.lists(st.tuples(st.floats(1, 400), st.floats(4, 90)), min_size=1, max_size=20)  # device, host


@settings(max_examples=60, deadline=None)
@given(kernels)
def test_a_chain_without_syncs_takes_the_longer_of_host_and_device(chain: list[tuple[float, float]]) -> None:
    def body(m: Machine) -> None:
        for us, host in chain:
            m.op("aten::relu", (64, 64), us=us, host=host)

    host_us, device_us = sum(host for _, host in chain), sum(us for us, _ in chain)
    step_us = replay.run(fakes.case(steps(body, 5)).model).step_s * 1e6
    assert step_us == pytest.approx(max(host_us, device_us), rel=0.01)


# ------------------------------------------------------------------------------------------------ at once, one by one

CALL = st.tuples(
    st.floats(0, 50),  # before it, µs
    st.floats(0, 10),  # its cost
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 60), st.floats(-2, 20), st.integers(-1, 30)), max_size=3),
    st.integers(-1, 40),  # the event that it waits for
)


def made_of(calls: list[Any], queue: int) -> Model:
    """Any chain of calls: events with a stream, a duration, a delay and another that they wait for, earlier or not."""
    events = [(at, *event) for at, call in enumerate(calls) for event in call[2]]
    columns = list(zip(*events, strict=True)) or [()] * 5
    count, n_events = len(calls), len(events)
    return Model(
        steps=1,
        call_row=np.arange(count),
        step=np.zeros(count, dtype=np.int64),
        before_s={"launch": np.array([call[0] for call in calls]) * 1e-6},
        cost_s=np.array([call[1] for call in calls]) * 1e-6,
        waits_for=np.array([call[3] if call[3] < n_events else -1 for call in calls], dtype=np.int64),
        tail_s=np.full(count, 1e-6),
        wait_kind=np.ones(count, dtype=np.int64),
        torch_events=np.zeros(count, dtype=np.int64),
        event_row=np.arange(n_events),
        call=np.array(columns[0], dtype=np.int64),
        stream=np.array(columns[1], dtype=np.int64),
        kind=np.zeros(n_events, dtype=np.int64),
        item=np.zeros(n_events, dtype=np.int64),
        duration_s=np.array(columns[2], dtype=np.float64) * 1e-6,
        latency_s=np.full(n_events, 4e-6),
        delay_s=np.array(columns[3], dtype=np.float64) * 1e-6,
        after=np.array([other if other < n_events else -1 for other in columns[4]], dtype=np.int64),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(CALL, min_size=1, max_size=40), st.sampled_from([3, 7, 1022]))
def test_runs_at_once_give_what_calls_one_by_one_give(calls: list[Any], queue: int) -> None:
    model = made_of(calls, queue)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "QUEUE", queue)
        for short in (0, 10**9):
            patch.setattr(replay, "SHORT", short)
            found.append(replay.run(model, repeats=4))
            assert replay.step_s(model, repeats=4) == found[-1].step_s  # the same sums, not about the same
    at_once, one_by_one = found
    assert at_once.step_s == pytest.approx(one_by_one.step_s, abs=1e-12)
    for name in ("event_start", "event_end", "host_start", "call_start", "wait_start", "wait_end", "call_end"):
        np.testing.assert_allclose(getattr(at_once, name), getattr(one_by_one, name), rtol=0, atol=1e-12, err_msg=name)
