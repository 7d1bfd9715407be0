"""The parts of a step add up to the step, and idle time lands where its cause was planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublight.diagnose import fakes, replay_test
from sublight.diagnose.fakes import BIG, Machine
from sublight.diagnose.record import BREAKDOWN
from sublight.diagnose.replay_test import products, steps
from sublight.trace.record import Trace

Body = Callable[[Machine], Any]


def parts_us(trace: Trace) -> dict[str, float]:
    return {name: 1e6 * seconds for name, seconds in fakes.case(trace).split.parts.items()}


def adds_up(trace: Trace) -> None:
    case = fakes.case(trace)
    assert list(case.split.parts) == list(BREAKDOWN)
    assert all(seconds >= 0 for seconds in case.split.parts.values())
    assert sum(case.split.parts.values()) == pytest.approx(case.step_s, rel=1e-9)


@pytest.mark.parametrize("name", replay_test.TRACES)
def test_the_parts_add_up_to_the_step(name: str) -> None:
    adds_up(replay_test.TRACES[name][0])


ACTIONS = st.one_of(
    st.tuples(st.just("op"), st.floats(1, 300), st.floats(4, 200), st.integers(0, 2), st.sampled_from([None, 0, 1, 2])),
    st.tuples(st.just("collective"), st.floats(1, 300), st.integers(0, 2), st.sampled_from([None, 0, 1])),
    st.tuples(st.just("copy"), st.floats(1, 300), st.sampled_from([4, 10_000_000]), st.booleans(), st.integers(0, 2)),
    st.tuples(st.sampled_from(["python", "load", "sync", "item", "cudaMalloc", "unknown"]), st.floats(1, 500)),
)


def act(m: Machine, action: Any) -> None:
    what, us, *rest = action
    if what == "op":
        host, stream, after = rest
        m.op("aten::relu", BIG, us=us, host=host, stream=stream, after=after)
    elif what == "collective":
        m.op("record_param_comms", us=us, kernel="ncclDevKernel_AllReduce", stream=rest[0], after=rest[1])
    elif what == "copy":
        size, blocking, stream = rest
        m.copy(us, size, blocking=blocking, stream=stream)
    elif what == "unknown":
        m.op("mylib::mystery", us=us, kernel="mystery")
    elif what == "cudaMalloc":
        m.call(what, us)
    else:
        getattr(m, what)(us)


@settings(max_examples=120, deadline=None)
@given(st.lists(ACTIONS, min_size=1, max_size=12), st.integers(1, 3))
def test_the_parts_of_any_step_add_up(actions: list[Any], count: int) -> None:
    adds_up(steps(lambda m: [act(m, action) for action in actions], count))


# ------------------------------------------------------------------------------------------------ causes


def after_a_sync(m: Machine) -> None:
    products(m, 10, 50.0)
    m.sync(tail_us=10.0)
    m.python(80.0)


def allocating(m: Machine) -> None:
    products(m, 10, 50.0)
    m.sync(200.0, name="cudaFree")
    m.call("cudaMalloc", 300.0)


def talking(m: Machine) -> None:
    products(m, 9, 50.0)
    m.op("record_param_comms", us=500.0, kernel="ncclDevKernel_AllReduce", stream=1, after=0)
    products(m, 1, 50.0, after=1)


CAUSES: dict[str, tuple[Body, float]] = {
    "launch": (lambda m: products(m, 50, 3.0, host=40.0), 50 * 37),
    "sync": (after_a_sync, 10 + 80 + 6.5),  # the wait's end, the glue behind it, the way to the next kernel
    "data": (lambda m: (m.load(3000.0), products(m, 10, 50.0)), 3000 + 80 - 500),
    "python": (lambda m: (m.python(3000.0), products(m, 10, 50.0)), 3000 + 80 - 500),
    "copy": (lambda m: (m.copy(500.0, 5_000_000, "Pinned"), products(m, 10, 50.0)), 500),
    "allocator": (allocating, 500),
    "communication": (talking, 500),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_idle_time_lands_at_its_cause(cause: str) -> None:
    body, idle_us = CAUSES[cause]
    parts = parts_us(steps(body))
    idle = {name: us for name, us in parts.items() if name not in ("floor", "fusable", "above_floor", "unknown")}
    assert parts[cause] == pytest.approx(idle_us, rel=0.03)
    assert sum(idle.values()) - parts[cause] < 0.03 * idle_us, f"some of it went elsewhere: {idle}"


def test_compiling_is_python() -> None:
    def body(m: Machine) -> None:
        with m.range("_compile.compile_inner (dynamo_timed)"):
            m.python(3000.0)
        products(m, 10, 50.0)

    assert parts_us(steps(body))["python"] == pytest.approx(3000 + 80 - 500, rel=0.03)


def test_hidden_copies_and_collectives_are_no_part() -> None:
    def body(m: Machine) -> None:
        m.copy(300.0, 5_000_000, "Pinned", stream=2)
        m.op("record_param_comms", us=300.0, kernel="ncclDevKernel_AllReduce", stream=1)
        products(m, 10, 50.0)

    parts = parts_us(steps(body))
    assert parts["copy"] < 10 and parts["communication"] < 10
    assert parts["floor"] + parts["above_floor"] == pytest.approx(500, rel=0.01)


# ------------------------------------------------------------------------------------------------ busy time


def test_busy_time_by_what_it_is_worth() -> None:
    """A pass over BIG: 100 µs at the floor. Two of them in a row need only one."""

    def body(m: Machine) -> None:
        m.op("aten::relu", BIG, us=130.0)
        m.op("aten::neg", BIG, us=120.0)
        products(m, 1, 1250.0)
        m.op("mylib::mystery", us=70.0, kernel="mystery")

    parts = parts_us(steps(body))
    assert parts["floor"] == pytest.approx(100 + 1000, rel=0.01)
    assert parts["fusable"] == pytest.approx(100, rel=0.01)
    assert parts["above_floor"] == pytest.approx(30 + 20 + 250, rel=0.01)
    assert parts["unknown"] == pytest.approx(70, rel=0.01)


def test_kernels_side_by_side_are_counted_once() -> None:
    def body(m: Machine) -> None:
        m.op("aten::relu", BIG, us=1000.0)
        m.op("mylib::mystery", us=1000.0, kernel="mystery", stream=1)

    case = fakes.case(steps(body))
    assert case.split.busy_s.sum() / case.step_s == pytest.approx(1.0, rel=0.02)
    assert case.step_s == pytest.approx(1000e-6, rel=0.02)


def test_what_beats_its_floor_is_the_floor() -> None:
    """From a cache a pass over BIG may take 60 µs: then 60 µs are the floor, and nothing is above it."""
    parts = parts_us(steps(lambda m: [m.op("aten::relu", BIG, us=60.0) or products(m, 1, 60.0, dtype=fakes.BF16)]))
    assert parts["floor"] == pytest.approx(120, rel=0.01)
    assert parts["above_floor"] == pytest.approx(0, abs=0.1)
