"""What is read off a trace: the host's time by cause, what each call waited for, what held each event back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sublight.diagnose import fakes, replay
from sublight.diagnose.events import WAITS
from sublight.diagnose.fakes import BIG, LATENCY_US, Machine
from sublight.diagnose.model import COMMUNICATION, COMPUTE, COPY, Model
from sublight.diagnose.replay_test import products, steps
from sublight.trace.record import NONE, Kind, Trace


def model_of(body: Callable[[Machine], Any], count: int = 2) -> Model:
    return fakes.case(steps(body, count)).model


def before_us(model: Model) -> dict[str, float]:
    """A step's host time between calls."""
    return {cause: column.sum() * 1e6 / model.steps for cause, column in model.before_s.items()}


def waits(model: Model) -> list[str]:
    """What calls wait in, in the first step."""
    return [WAITS[kind] for kind in model.wait_kind[model.step == 0] if kind]


# ------------------------------------------------------------------------------------------------ the host


def test_calls_and_a_marker_in_each_step() -> None:
    model = model_of(lambda m: products(m, 3, 50.0))
    assert model.call_row.shape == (8,)
    assert np.flatnonzero(model.call_row == NONE).tolist() == [3, 7]
    assert model.step.tolist() == [0] * 4 + [1] * 4
    assert model.call.tolist() == [0, 1, 2, 4, 5, 6]
    assert model.cost_s[0] * 1e6 == pytest.approx(fakes.CALL_US)


def test_the_hosts_time_is_all_there() -> None:
    model = model_of(lambda m: (m.load(700.0), m.python(400.0), products(m, 3, 50.0), m.python(30.0)))
    spent = before_us(model)
    assert sum(spent.values()) + 3 * fakes.CALL_US == pytest.approx(700 + 400 + 3 * 8 + 30)


@pytest.mark.parametrize(
    ("body", "cause", "us"),
    [
        (lambda m: m.load(700.0), "data", 700),
        (lambda m: m.python(700.0), "python", 700),
        (lambda m: m.python(90.0), "launch", 90 + 15),  # glue between ops; 5 of each product's 8 are not its call
        (lambda m: compiling(m, 700.0), "compile", 700),
        (lambda m: host_op(m, 700.0), "python", 700),  # an op that starts nothing is the host's work
        (lambda m: host_op(m, 90.0), "launch", 90 + 15),
    ],
)
def test_the_hosts_time_by_cause(body: Callable[[Machine], Any], cause: str, us: float) -> None:
    spent = before_us(model_of(lambda m: (body(m), products(m, 3, 50.0))))
    assert spent[cause] == pytest.approx(us)
    others = {name: spent[name] for name in spent if name not in (cause, "launch")}
    assert sum(others.values()) == pytest.approx(0, abs=1e-6)


def compiling(m: Machine, us: float) -> None:
    with m.range("compile_fx.<locals>.fw_compiler_base (dynamo_timed)"):
        m.python(us)


def host_op(m: Machine, us: float) -> None:
    with m.range("aten::index_select", Kind.OP):
        m.python(us)


def test_loading_is_not_python_too() -> None:
    spent = before_us(model_of(lambda m: (m.load(700.0), m.python(300.0), products(m, 3, 50.0))))
    assert (spent["data"], spent["python"]) == (pytest.approx(700), pytest.approx(300))


def test_time_between_the_steps_is_no_ones() -> None:
    machine = Machine()
    for _ in range(2):
        with machine.step():
            products(machine, 3, 50.0)
        machine.python(5000.0)
    assert sum(before_us(fakes.case(machine.trace()).model).values()) == pytest.approx(3 * 5)


def test_a_rule_takes_a_cause_away() -> None:
    model = model_of(lambda m: (m.python(700.0), products(m, 3, 50.0), m.python(500.0), products(m, 1, 50.0)))
    assert before_us(model.without("python"))["python"] == 0
    assert before_us(model.without("python", [0]))["python"] == pytest.approx(1200 - 700 / 2)
    assert before_us(model)["python"] == pytest.approx(1200), "the model itself stays"


# ------------------------------------------------------------------------------------------------ waits


def test_a_sync_waits_for_the_last_event() -> None:
    model = model_of(lambda m: (products(m, 3, 50.0), m.sync(tail_us=7.0)))
    assert waits(model) == ["sync"]
    (first, second) = np.flatnonzero(model.wait_kind)
    assert model.waits_for[[first, second]].tolist() == [2, 5]
    assert model.tail_s[first] * 1e6 == pytest.approx(7)
    assert model.cost_s[first] == 0


def test_a_sync_that_finds_nothing_to_wait_for() -> None:
    model = model_of(lambda m: (products(m, 3, 50.0), m.python(3000.0), m.sync()))
    call = np.flatnonzero(model.wait_kind)[0]
    assert model.waits_for[call] == NONE
    assert model.cost_s[call] * 1e6 == pytest.approx(2)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (lambda m: m.copy(500.0, 65_536, blocking=True), ["copy"]),
        (lambda m: m.copy(500.0, 65_535, blocking=True), ["sync"]),  # there for the sync, not for the bytes
        (lambda m: m.copy(500.0, 65_536), []),
        (lambda m: m.sync(name="cudaFree"), ["allocator"]),
        (lambda m: m.call("cudaMalloc", 300.0), ["allocator"]),
        (lambda m: m.sync(name="hipDeviceSynchronize"), ["sync"]),
        (lambda m: m.call("cudaGetDevice", 300.0), []),
    ],
)
def test_what_a_call_waits_in(body: Callable[[Machine], Any], kind: list[str]) -> None:
    assert waits(model_of(lambda m: (products(m, 3, 50.0), body(m)))) == kind


def test_a_slow_launch_of_a_short_kernel_waits_for_nothing() -> None:
    model = model_of(lambda m: m.launch("elementwise", 20.0, blocking=True))  # the call returns after its kernel's end
    assert waits(model) == [] and (model.waits_for == NONE).all()
    assert model.cost_s.max() > 0


def test_a_sync_inside_another_call_is_that_calls() -> None:
    def body(m: Machine) -> None:
        products(m, 3, 50.0)
        with m.range("cudaFree", Kind.RUNTIME):
            m.sync()

    assert waits(model_of(body)) == ["allocator"]


# ------------------------------------------------------------------------------------------------ events


def test_an_events_latency_and_its_dependence() -> None:
    def body(m: Machine) -> None:
        products(m, 1, 50.0)
        products(m, 1, 70.0, stream=1, after=0)

    model = model_of(body)
    assert model.latency_s[0] * 1e6 == pytest.approx(LATENCY_US)
    assert model.after.tolist()[:2] == [NONE, 0]
    assert model.delay_s[:2] * 1e6 == pytest.approx([0, 0], abs=1e-3)
    assert model.stream.tolist() == [0, 1, 0, 1]


def test_an_event_held_back_by_nothing_that_is_known_keeps_its_delay() -> None:
    machine = Machine()
    with machine.step():
        products(machine, 1, 50.0)
        machine.free[0] += 300.0  # a gap on the stream that neither the host nor another stream explains
        products(machine, 1, 50.0)
    model = fakes.case(machine.trace()).model
    assert model.delay_s[1] * 1e6 == pytest.approx(300)
    assert replay.run(model).step_s * 1e6 == pytest.approx(400, rel=0.02)


def test_work_from_before_the_trace_holds_nothing_back() -> None:
    """The first event ran 5 ms after its launch: what the stream did before is not in the trace."""
    machine = Machine()
    machine.free[0] = 5000.0
    for _ in range(2):
        with machine.step():
            products(machine, 3, 50.0)
    model = fakes.case(machine.trace()).model
    assert model.delay_s.max() < 1e-6
    assert replay.run(model).step_s * 1e6 == pytest.approx(150, rel=0.02)


def test_kinds_of_events() -> None:
    def body(m: Machine) -> None:
        m.copy(10.0, 4, "Pinned")
        m.op("aten::relu", BIG, us=110.0)
        m.op("record_param_comms", us=50.0, kernel="ncclDevKernel_AllReduce")
        m.launch("Memcpy DtoD (Device -> Device)", 10.0, kind=Kind.MEMCPY, call="cudaMemcpyAsync", size=100)

    model = model_of(body, 1)
    assert model.kind.tolist() == [COPY, COMPUTE, COMMUNICATION, COMPUTE]  # within the device is the device's work


def test_one_graph_launch_starts_many_events() -> None:
    machine = Machine()
    for _ in range(2):
        with machine.step():
            machine.launch("k0", 10.0, call="cudaGraphLaunch")
            number, end = machine._launches, machine.free[0]
            for n in range(1, 20):
                machine.add(Kind.KERNEL, f"k{n}", 2, end + 10 * n - 10, end + 10 * n, correlation=number)
            machine.free[0] = end + 190
    model = fakes.case(machine.trace()).model
    assert model.call.tolist() == [0] * 20 + [2] * 20
    assert replay.run(model).step_s * 1e6 == pytest.approx(200, rel=0.02)


def test_a_trace_of_the_device_alone() -> None:
    machine = Machine()
    for n in range(4):
        machine.add(Kind.KERNEL, "k", 2, 100.0 * n, 100.0 * n + 60)
    model = fakes.case(machine.trace()).model
    assert len(model.event_row) == 4
    assert replay.run(model).step_s * 1e6 == pytest.approx(360, rel=0.02)


def test_recorded_events_are_counted_for_the_profilers_cost() -> None:
    model = model_of(lambda m: (m.python(5.0), products(m, 3, 50.0)))
    assert model.torch_events.tolist() == [2, 2, 2, 0] * 2  # an op and a call each


# ------------------------------------------------------------------------------------------------ a CPU


def on_cpu(count: int = 2) -> Trace:
    def body(m: Machine) -> None:
        m.load(300.0)
        with m.range("aten::linear", Kind.OP):  # of no known cost without its shapes: its parts are the work
            m.python(20.0)
            m.work("aten::mm", (64, 64), (64, 64), us=100.0)
        m.work("aten::relu", (64, 64), us=50.0)

    return steps(body, count)


def test_a_cpus_work_is_its_ops() -> None:
    case = fakes.case(on_cpu())
    assert [item.name for item in case.items] == ["aten::mm", "aten::relu"] * 2
    assert case.model.duration_s * 1e6 == pytest.approx([100, 50, 100, 50])
    assert before_us(case.model)["data"] == pytest.approx(300)
    assert before_us(case.model)["launch"] == pytest.approx(20)
    assert case.step_s * 1e6 == pytest.approx(470)


@pytest.mark.parametrize("around", ["enumerate(DataLoader)#_Iter.__next__", "_compile.compile_inner (dynamo_timed)"])
def test_a_batch_or_a_compilation_is_no_work_of_the_steps(around: str) -> None:
    def body(m: Machine) -> None:
        with m.range(around):
            m.work("aten::mm", (64, 64), (64, 64), us=300.0)
        m.work("aten::relu", (64, 64), us=50.0)

    case = fakes.case(steps(body, 2))
    assert [item.name for item in case.items] == ["aten::relu"] * 2
    assert before_us(case.model)["data" if "Loader" in around else "compile"] == pytest.approx(300)


def test_two_threads_at_once_are_counted_once() -> None:
    machine = Machine()
    with machine.step():
        machine.work("aten::mm", (64, 64), (64, 64), us=100.0)
        machine.thread, machine.now = 1, 50.0
        machine.work("aten::relu", (64, 64), us=100.0)
    case = fakes.case(machine.trace())
    assert case.model.duration_s.sum() * 1e6 == pytest.approx(150)
