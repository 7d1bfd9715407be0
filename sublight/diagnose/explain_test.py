"""From traces to an Explanation: floors, findings, the verdict, and the notes that a reader must have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublight import nvml
from sublight.diagnose import explain as module
from sublight.diagnose import fakes
from sublight.diagnose.breakdown_test import ACTIONS, act
from sublight.diagnose.consistency import contradictions
from sublight.diagnose.fakes import BIG, GEMM, PRODUCT, Machine
from sublight.diagnose.record import BREAKDOWN, NOT_JUDGED, Explanation
from sublight.diagnose.replay_test import products, steps
from sublight.errors import BadInput
from sublight.report.explain import trace_fakes
from sublight.results import write_json
from sublight.trace.record import Kind, Trace

Explain = Callable[..., Explanation]


@pytest.fixture(scope="module")
def explain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explain]:
    """With the made-up machine's limits, whatever this machine is."""
    folder = tmp_path_factory.mktemp("limits")
    for kind in ("cuda", "cpu"):
        write_json(fakes.limits(kind).to_json(), folder / f"{kind}.json")

    def call(*traces: Trace, **more: Any) -> Explanation:
        kind = "cuda" if traces and traces[0].on_gpu else "cpu"
        return module.explain(traces, **{"limits_file": str(folder / f"{kind}.json"), **more})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBLIGHT_CACHE", str(folder))
        patch.setattr(nvml, "health", lambda: None)
        yield call


def consistent(found: Explanation) -> None:
    """What holds of every explanation."""
    assert contradictions(found) == []
    assert json.loads(json.dumps(found.to_json()))["verdict"] == found.verdict


def slow(m: Machine) -> None:
    """Loading, a slow kernel, a sync: each fix alone is worth something, and they overlap."""
    m.load(1000.0)
    m.lookups(5, 100.0)
    m.op("aten::relu", BIG, us=1000.0)
    m.item()


# ------------------------------------------------------------------------------------------------ the whole


def test_a_step_with_several_causes(explain: Explain) -> None:
    found = explain(steps(slow), source="train.py")
    consistent(found)
    assert (found.source, found.device, found.kind) == ("train.py", "NVIDIA H200", "cuda")
    assert (found.steps, found.steps_from) == (4, "ProfilerStep ranges")
    assert found.step_s * 1e6 == pytest.approx(1000 + 500 + 1000, rel=0.02)
    assert {"data-loading", "slow-kernel", "host-sync"} <= {finding.id for finding in found.findings}
    assert found.combined_saving_s < sum(finding.saving_s for finding in found.findings)
    assert all(place.end_s > place.start_s for finding in found.findings for place in finding.places)


def test_savings_that_hide_each_other_are_worth_little_alone(explain: Explain) -> None:
    """Loading and Python stand before the same idle device: together they save more than the larger one."""
    found = explain(steps(lambda m: (m.load(1000.0), m.python(800.0), m.lookups(10, 50.0))))
    consistent(found)
    savings = {finding.id: finding.saving_s * 1e6 for finding in found.findings}
    assert savings["data-loading"] == pytest.approx(1000, rel=0.02)
    assert savings["host-bound"] == pytest.approx(800, rel=0.02)
    assert found.combined_saving_s * 1e6 == pytest.approx(1880 - 500, rel=0.02)


@pytest.mark.parametrize(("python_us", "verdict"), [(0, "healthy"), (1005, "healthy"), (1020, "host-bound")])
def test_the_verdict_wants_five_percent(explain: Explain, python_us: float, verdict: str) -> None:
    """10 ops keep the host for 40 µs, the device for 1000: from 1010 µs of Python on, it is more than 5 %."""
    found = explain(steps(lambda m: (m.python(python_us), m.lookups(10, host=4.0))))
    consistent(found)
    assert found.verdict == verdict
    if verdict == "healthy":
        assert found.sentence.startswith("Healthy: the device works for ") and "% of the limit" in found.sentence


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTIONS, min_size=1, max_size=10), st.integers(1, 3), st.sampled_from([None, 50e-6, 5e-3]))
def test_any_step_gets_a_consistent_explanation(
    explain: Explain, actions: list[Any], count: int, measured: float | None
) -> None:
    trace = steps(lambda m: [act(m, action) for action in actions], count)
    if measured:
        trace = dataclasses.replace(trace, meta={"unprofiled_step_s": [measured]})
    consistent(explain(trace))


def test_a_training_loop_with_something_of_everything(explain: Explain) -> None:
    found = explain(trace_fakes.trace())
    consistent(found)
    assert {"data-loading", "host-sync", "pageable-copy"} <= {finding.id for finding in found.findings}


# ------------------------------------------------------------------------------------------------ floors


def test_an_unknown_cost_counts_as_measured_and_is_said(explain: Explain) -> None:
    def body(m: Machine) -> None:
        m.op("aten::mm", *PRODUCT, us=1500.0, kernel=GEMM)
        m.op("mylib::mystery", us=500.0, kernel="mystery")

    found = explain(steps(body))
    consistent(found)
    assert found.op_floor_s * 1e6 == pytest.approx(1000 + 500, rel=0.01)
    assert found.breakdown["unknown"] * 1e6 == pytest.approx(500, rel=0.01)
    (note,) = (note for note in found.notes if "mylib::mystery" in note)
    assert "25 %" in note
    row = next(row for row in found.ops if row.name == "mylib::mystery")
    assert row.floor_s is None and row.fraction is None and row.device_s * 1e6 == pytest.approx(500, rel=0.01)


def test_the_op_table_is_by_op_shape_and_type(explain: Explain) -> None:
    def body(m: Machine) -> None:
        products(m, 3, 1250.0)
        m.op("aten::mm", (4_000, 1_000), (1_000, 10_000), us=125.0, kernel=GEMM)

    first, second = explain(steps(body)).ops
    assert (first.name, first.calls, first.dtype, first.family) == ("aten::mm", 3, "bfloat16", "matmul")
    assert first.device_s * 1e6 == pytest.approx(3750) and first.floor_s == pytest.approx(3000e-6)
    assert first.bound == "matmul_bf16" and first.kernels == (GEMM,)
    assert first.flops == pytest.approx(3 * 2 * 4e3 * 1e8) and first.cpu_s * 1e6 == pytest.approx(24)
    assert second.fraction == pytest.approx(0.8)


def test_what_beats_its_floor_is_said_where_no_cache_explains_it(explain: Explain) -> None:
    found = explain(steps(lambda m: products(m, 3, 500.0)))  # 1 ms of arithmetic in half of it
    consistent(found)
    assert any("so a cost or a limit is wrong: aten::mm" in caveat for caveat in found.caveats)
    assert found.ops[0].fraction == pytest.approx(2.0), "and it shows where it is"
    assert found.op_floor_s * 1e6 == pytest.approx(3 * 500), "the step has no more time than it took"


def test_what_a_cache_gave_is_marked_so(explain: Explain) -> None:
    found = explain(steps(lambda m: (m.op("aten::relu", (4000, 8000), us=20.0), m.lookups(1, 200.0))))
    consistent(found)
    row = next(row for row in found.ops if row.name == "aten::relu")
    assert row.fraction == pytest.approx(1.0) and row.bound == "cache"
    assert not any("Faster" in caveat for caveat in found.caveats)
    assert found.op_floor_s * 1e6 == pytest.approx(20 + 100, rel=0.01)


def test_without_limits_there_are_findings_and_no_floors(explain: Explain) -> None:
    unnamed = dataclasses.replace(steps(slow), devices=())
    found = explain(unnamed, limits_file="")
    consistent(found)
    assert {"data-loading", "host-sync"} <= {finding.id for finding in found.findings}
    assert any(note.startswith("Limits: none") for note in found.notes)
    assert all(row.floor_s is None for row in found.ops)


# ------------------------------------------------------------------------------------------------ measured steps


@pytest.mark.parametrize("measured_s", [2.0e-3, 2.5e-3, 9e-3])
def test_the_measured_step_is_the_step(explain: Explain, measured_s: float) -> None:
    """Also where the recorded step was another: the parts are fitted to it, and a caveat says so."""
    found = explain(dataclasses.replace(steps(slow), meta={"unprofiled_step_s": [measured_s, measured_s * 1.01]}))
    consistent(found)
    assert found.step_s == pytest.approx(1.005 * measured_s)
    assert any("than those that were timed" in caveat for caveat in found.caveats) == (measured_s > 5e-3)
    assert found.unsure == (measured_s > 5e-3) == found.sentence.startswith("Probably: ")


def test_steps_that_others_made_longer_are_not_the_step(explain: Explain) -> None:
    """A profiler makes no step shorter: what was timed longer on a crowded machine is no idle time of the script's."""
    meta = {"unprofiled_step_s": [9e-3, 8e-3], "load": 8.0, "cores": 2}
    found = explain(dataclasses.replace(steps(slow), meta=meta))
    consistent(found)
    assert found.step_s == found.traced_step_s < 3e-3 and found.breakdown["other"] < 0.1 * found.step_s
    assert any("the figures are of the recorded ones" in caveat for caveat in found.caveats) and found.unsure


def test_a_profiler_that_slowed_the_step_is_said(explain: Explain) -> None:
    def body(m: Machine) -> None:
        m.lookups(50, 3.0, host=20.0)

    slowed, fair = (
        explain(dataclasses.replace(steps(body), meta={"unprofiled_step_s": [step_s]})) for step_s in (700e-6, 970e-6)
    )
    assert any(note.startswith("Under the profiler a step took 1.00 ms") for note in slowed.notes)
    assert not any("profiler" in note for note in fair.notes)


def test_a_step_that_was_not_measured_is_corrected_by_an_estimate(explain: Explain) -> None:
    """Step, parts and savings are all without the profiler's estimated 4 µs an op; the recorded step is kept beside."""
    trace = dataclasses.replace(steps(lambda m: m.lookups(50, 3.0, host=24.0)), tool="pytorch")
    found = explain(trace)
    consistent(found)
    assert found.step_s * 1e6 == pytest.approx(50 * 20, rel=0.01)
    assert found.traced_step_s * 1e6 == pytest.approx(50 * 24, rel=0.01)
    assert found.breakdown["launch"] * 1e6 == pytest.approx(50 * 17, rel=0.01)
    assert (found.verdict, found.findings[0].id) == ("launch-bound", "launch-bound")
    assert found.findings[0].saving_s * 1e6 == pytest.approx(50 * 20 - 50 * 3.7, rel=0.01)
    assert any("Under the profiler a step took 1.20 ms" in note for note in found.notes)


def test_a_profiler_that_was_most_of_the_step_is_a_caveat_and_no_verdict(explain: Explain) -> None:
    def body(m: Machine) -> None:
        for _ in range(50):
            with m.range("step.py(3): f", Kind.PYTHON):
                m.lookups(1, 3.0, host=12.0)

    found = explain(dataclasses.replace(steps(body), tool="pytorch"))
    consistent(found)
    assert found.verdict == "launch-bound" and found.unsure
    assert any("The profiler cost about" in line and "without stacks" in line for line in found.caveats)


@pytest.mark.parametrize("step_s", [1e-6, 0.9e-3, 1.2e-3, 5e-3])
def test_parts_are_fitted_to_the_measured_step(step_s: float) -> None:
    parts = {**dict.fromkeys(BREAKDOWN, 0.0), "floor": 0.5e-3, "fusable": 0.1e-3, "launch": 0.3e-3, "data": 0.3e-3}
    fitted = module._adding_up_to(step_s, parts)
    assert sum(fitted.values()) == pytest.approx(step_s, rel=1e-9) and min(fitted.values()) >= 0
    if step_s >= 0.9e-3:
        assert (fitted["floor"], fitted["fusable"]) == (0.5e-3, 0.1e-3), "the device's work is what it is"
        assert fitted["launch"] == pytest.approx(fitted["data"])


def test_spread_is_of_the_measured_steps_where_there_are_some(explain: Explain) -> None:
    trace = steps(slow)
    assert explain(steps(slow, 1)).step_spread_s == 0.0
    times = [2.5e-3, 2.6e-3, 2.7e-3, 2.8e-3]
    assert explain(dataclasses.replace(trace, meta={"unprofiled_step_s": times})).step_spread_s > 0.05e-3


# ------------------------------------------------------------------------------------------------ ranks, ranges, notes


def test_ranks_that_wait_for_each_other(explain: Explain) -> None:
    traces = [
        dataclasses.replace(steps(lambda m, us=us: products(m, 10, us)), rank=rank)
        for rank, us in ((1, 100.0), (0, 200.0))
    ]
    found = explain(*traces)
    consistent(found)
    assert found.verdict == "rank-imbalance"
    finding = found.findings[0]
    assert finding.saving_s * 1e6 == pytest.approx(500, rel=0.01)
    assert finding.evidence[0].startswith("rank 0: 2") and finding.evidence[1].startswith("rank 1: 1")
    assert 0.7 * found.floor_s < found.fixed_floor_s < 0.8 * found.floor_s  # it keeps 1.5 of 2 ms of work
    assert any(note.startswith("2 ranks were read") for note in found.notes)


def test_ranges_group_device_time_by_stream(explain: Explain) -> None:
    def body(m: Machine) -> None:
        with m.range("forward"):
            products(m, 2, 125.0)
            products(m, 1, 300.0, stream=1)
        products(m, 1, 125.0)

    found = {row.name: row for row in explain(steps(body)).ranges}
    assert set(found) == {"forward"}
    assert (found["forward"].calls, found["forward"].streams) == (1, 2)
    assert found["forward"].host_s * 1e6 == pytest.approx(24)
    assert found["forward"].device_s * 1e6 == pytest.approx(250 + 300)


def test_what_was_lost_and_left_out_is_said(explain: Explain) -> None:
    machine = Machine()
    for number in range(4):
        with machine.step():
            machine.python(50_000.0 if number == 0 else 500.0)
            products(machine, 10, 50.0)
    found = explain(machine.trace(lost=["The file ends in the middle of an event."]))
    assert found.caveats[0] == "The file ends in the middle of an event." and found.unsure
    assert "warm-up" in found.notes[0] and found.steps == 3
    events = len(machine.trace())
    for lost, unsure in ((events // 200, False), (events // 5, True)):
        found = explain(machine.trace(lost=[f"{lost} events had no time."]))
        assert found.unsure == unsure == found.sentence.startswith("Probably") and "had no time" in found.caveats[0]


def test_ops_of_two_processes_in_one_file_are_a_doubt(explain: Explain) -> None:
    trace = steps(lambda m: products(m, 10, 125.0))
    lane, lanes = trace.lane.copy(), list(trace.lanes)
    lane[trace.of_kind(Kind.OP)[::2]], lanes[1] = 1, dataclasses.replace(lanes[1], process="python 2")
    found = explain(dataclasses.replace(trace, lane=lane, lanes=tuple(lanes)))
    assert found.unsure and found.caveats[0].startswith("The file holds ops of 2 processes (python, python 2)")
    assert not explain(trace).unsure


def test_the_window_is_the_last_step_with_its_device_work(explain: Explain) -> None:
    found = explain(steps(lambda m: products(m, 10, 125.0)))
    assert found.window_s[0] * 1e6 == pytest.approx(3 * 80)
    assert found.window_s[1] * 1e6 == pytest.approx(6.5 + 40 * 125)


# ------------------------------------------------------------------------------------------------ little to go by


def test_a_cpu_trace(explain: Explain) -> None:
    found = explain(steps(lambda m: (m.load(3000.0), m.work("aten::mm", (1000, 1000), (1000, 1000), us=500.0))))
    consistent(found)
    assert (found.kind, found.verdict) == ("cpu", "data-loading")
    assert found.ops[0].name == "aten::mm" and found.ops[0].fraction is not None


def one_event(kind: Kind) -> Trace:
    machine = Machine()
    machine.add(kind, "nn.Module: Net_0" if kind == Kind.PYTHON else "aten::relu", 2 if kind in (2, 3, 4) else 0, 0, 5)
    return machine.trace()


@pytest.mark.parametrize("kind", list(Kind))
def test_one_event_is_enough(explain: Explain, kind: Kind) -> None:
    consistent(explain(one_event(kind)))


def test_a_few_ops_are_no_verdict(explain: Explain) -> None:
    """Nor is a step of which no cost is known a healthy one; steps that repeat one op are."""

    def found(steps: int, ops: int, name: str) -> Explanation:
        machine = Machine()
        for _ in range(steps):
            with machine.step():
                for _ in range(ops):
                    machine.work(name, BIG, us=1000)
        explanation = explain(machine.trace(tool="kineto"))
        consistent(explanation)
        return explanation

    for ops, words in ((1, "one op"), (9, "9 ops")):
        few = found(1, ops, "aten::relu")
        assert few.unsure and few.sentence == f"No step to judge: all that was recorded is {words}"
        assert few.verdict == NOT_JUDGED
    assert not found(1, 10, "aten::relu").unsure and not found(4, 1, "aten::relu").unsure
    assert found(3, 9, "my::secret").sentence.startswith("No cause was found: ops run for ")


@pytest.mark.parametrize("body", [lambda m: m.python(500.0), lambda m: m.load(500.0), lambda m: m.call("cudaFree")])
def test_no_device_events_and_no_ops(explain: Explain, body: Callable[[Machine], Any]) -> None:
    found = explain(steps(body))
    consistent(found)
    assert found.kind == "cpu" and found.ops == ()
    assert any("no device events" in note for note in found.notes)


def test_an_empty_trace_and_none(explain: Explain) -> None:
    consistent(explain(Machine().trace()))
    with pytest.raises(BadInput, match="no trace"):
        explain()


@pytest.mark.parametrize(
    ("meta", "doubt", "sentence"),
    [
        ({"steps_from": "the whole run"}, "No step was found", "No step to judge, only a whole run. Most of it: "),
        (
            {"notes": ["no step after the warm-up could be profiled: …"]},
            "The steps are the script's first",
            "No step to judge, only the script's first ones. Most of them: ",
        ),
        (
            {"notes": ["an optimizer exists, and did not step while steps were looked for: …"]},
            "A step here is one call of the outermost module",
            "Probably: Python outside of torch",
        ),
        ({"notes": 3}, "", "Python outside of torch"),
    ],
)
def test_what_is_no_warm_step_is_not_judged_as_one(meta: Any, doubt: str, sentence: str) -> None:
    machine = fakes.Machine()
    for _ in range(3):
        with machine.step():
            machine.python(2_000.0)
            machine.lookups(10)
            machine.sync()
    found = module.explain([machine.trace(**meta)], gpu="h200")
    assert found.sentence.startswith(sentence)
    whole = "steps_from" in meta  # of which nothing is said a step
    assert any("step" in words for words in (found.sentence[17:], *found.findings[0].evidence)) != whole
    assert found.unsure == bool(doubt) and (not doubt or found.caveats[0].startswith(doubt))
