"""The profiler's own cost: taken off where the same run was timed without it, and only there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sublight.diagnose import explain, fakes, replay, unprofiled
from sublight.diagnose.fakes import PRODUCT, Machine
from sublight.diagnose.rules import RULES
from sublight.trace.load import load
from sublight.trace.record import Trace

PROFILER_US = 4.0  # an op


def loop(*, us: float, host: float, python: float = 0.0, **more: Any) -> Trace:
    """50 ops a step."""
    machine = Machine()
    for _ in range(4):
        with machine.step():
            machine.python(python)
            for _ in range(50):
                machine.op("aten::mm", (64, 64), (64, 64), us=us, host=host, kernel=fakes.GEMM)
    return machine.trace(**more)


@pytest.mark.parametrize(
    ("trace", "measured_us"),
    [
        (loop(us=3.0, host=12.0, unprofiled_step_s=[400e-6]), 400),
        (loop(us=3.0, host=12.0, unprofiled_step_s=[900e-6, 400e-6, 410e-6]), 410),  # the median
        (loop(us=3.0, host=12.0, unprofiled_total_s=4e-3, unprofiled_steps=10, unprofiled_step_s=[1.0]), 400),
        (loop(us=3.0, host=12.0, python=1000.0, unprofiled_step_s=[900e-6]), 900),  # more than the events cost
    ],
)
def test_a_corrected_step_lasts_what_was_measured(trace: Trace, measured_us: float) -> None:
    case = fakes.case(trace)
    assert case.step_s * 1e6 == pytest.approx(measured_us, rel=0.01)
    assert case.profiled_step_s > 1.1 * case.step_s
    assert unprofiled.unprofiled_s(trace) * 1e6 == pytest.approx(measured_us)


def test_a_cpu_ops_own_time_holds_profiling_too() -> None:
    machine = Machine()
    for _ in range(4):
        with machine.step():
            for _ in range(50):
                machine.work("aten::mm", (64, 64), (64, 64), us=12.0)
    case = fakes.case(machine.trace(unprofiled_step_s=[400e-6]))
    assert case.step_s * 1e6 == pytest.approx(400, rel=0.01)


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"unprofiled_step_s": []},
        {"unprofiled_step_s": "fast"},
        {"unprofiled_step_s": ["fast", None]},
        {"unprofiled_total_s": 1e-4, "unprofiled_steps": 0},
    ],
)
def test_without_a_measured_time_nothing_changes(meta: dict[str, Any]) -> None:
    trace = loop(us=3.0, host=12.0, **meta)
    plain = fakes.case(loop(us=3.0, host=12.0)).model
    model, off = unprofiled.corrected(plain, trace)
    assert model is plain and off == 0
    assert replay.run(model).step_s * 1e6 == pytest.approx(600, rel=0.01)


@pytest.mark.parametrize(("us", "step_us"), [(3.0, 900), (15.0, 750)])
def test_a_step_that_was_recorded_too_short_was_so_on_the_host(us: float, step_us: float) -> None:
    """Where the host is what the step waits for; a device that works all the time is not made to wait for it."""
    case = fakes.case(loop(us=us, host=12.0, unprofiled_step_s=[900e-6]))
    assert case.step_s * 1e6 == pytest.approx(step_us, rel=0.01)
    assert case.model_off == pytest.approx(50 * max(us, 12.0) / 900 - 1, abs=0.01)
    assert case.model.duration_s.max() * 1e6 == pytest.approx(us)


def test_somebody_elses_trace_is_corrected_by_an_estimate() -> None:
    """2 µs for an op and for its call; where nothing ran on a GPU, nothing is known."""
    case = fakes.case(loop(us=3.0, host=12.0, tool="pytorch"))
    assert case.step_s * 1e6 == pytest.approx(50 * (12 - 4), rel=0.01)
    assert case.profiled_step_s * 1e6 == pytest.approx(600, rel=0.01)
    machine = Machine()
    machine.work("aten::mm", (64, 64), (64, 64), us=500.0)
    assert fakes.case(machine.trace(tool="pytorch")).step_s * 1e6 == pytest.approx(500)


def test_a_measured_time_that_no_host_could_reach_shortens_everything() -> None:
    """A fifth of the host's time is its own: what is still too long then is shortened throughout, and that is said."""
    case = fakes.case(loop(us=0.5, host=12.0, unprofiled_step_s=[1e-6]))
    plain = fakes.case(loop(us=0.5, host=12.0))
    before, after = (one.model.before_s["launch"].sum() for one in (plain, case))
    assert case.step_s == pytest.approx(1e-6, rel=0.01) and case.model_off > 10
    assert case.model.duration_s.sum() / plain.model.duration_s.sum() == pytest.approx(
        1 / (1 + case.model_off), rel=0.02
    )
    assert after * (1 + case.model_off) >= unprofiled.LEFT**2 * before * 0.99


@pytest.mark.parametrize(("us", "host", "is_launch_bound"), [(12.0, 10.0, False), (3.0, 30.0, True)])
def test_the_profilers_cost_makes_no_step_launch_bound(us: float, host: float, is_launch_bound: bool) -> None:
    """The device is busy for 12 µs an op, the host takes 10, or under the profiler 14: measured, and estimated."""
    real_s = 50 * max(us, host) * 1e-6
    measured = loop(us=us, host=host + PROFILER_US, unprofiled_step_s=[real_s])
    estimated = loop(us=us, host=host + PROFILER_US, tool="pytorch")
    for trace in (measured, estimated):
        findings, _ = fakes.findings(fakes.case(trace), RULES)
        ids = [finding.id for finding in findings if finding.saving_s > 0.05 * real_s]
        assert ("launch-bound" in ids) == is_launch_bound


def test_a_products_time_is_no_profiling() -> None:
    machine = Machine()
    for _ in range(4):
        with machine.step():
            machine.op("aten::mm", *PRODUCT, us=1250.0, kernel=fakes.GEMM)
    case = fakes.case(machine.trace(unprofiled_step_s=[1000e-6]))
    assert case.model_off == pytest.approx(0.25, abs=0.01)
    assert case.step_s * 1e6 == pytest.approx(1000, rel=0.01), "and yet the figures are of the step that was timed"


def test_a_host_bound_saving_is_of_the_step_that_it_is_told() -> None:
    """`--fix` explains the same steps anew for the plain run's step: what the host takes less, a graph saves less."""
    recorded = Path(__file__).parents[2] / "examples" / "recorded" / "h200"
    (trace,) = load(recorded / "launch_bound.json.gz")

    def found(step_s: float) -> tuple[float, float]:
        plain = replace(trace, meta={**trace.meta, "unprofiled_total_s": step_s, "unprofiled_steps": 1})
        explanation = explain.explain([plain], limits_file=str(recorded / "limits.json"))
        (saving_s,) = [finding.saving_s for finding in explanation.findings if finding.id == "launch-bound"]
        return explanation.step_s, saving_s

    (watched_s, most_s), (plain_s, least_s) = found(10.6e-3), found(7.0e-3)
    assert (watched_s, plain_s) == (10.6e-3, 7.0e-3)
    assert most_s - least_s == pytest.approx(3.6e-3, rel=0.05), "all of the difference is the host's"
