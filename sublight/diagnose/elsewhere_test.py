"""A recorded step on another GPU: ops move with their floors, idle time stays, the same GPU gives the same step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sublight import nvml
from sublight.cost import Cost
from sublight.diagnose import elsewhere, fakes
from sublight.diagnose.explain import explain
from sublight.diagnose.replay_test import products, steps
from sublight.diagnose.work import Item
from sublight.errors import BadInput
from sublight.predict import machine
from sublight.trace import load
from sublight.trace.costs import OpCost
from sublight.trace.record import Device, Trace


@pytest.fixture(autouse=True)
def _another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a GPU, never measured."""
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvml, "health", lambda: None)


def on(name: str, trace: Trace) -> Trace:
    return dataclasses.replace(trace, devices=(Device(index=0, name=name),))


def ten_products(m: Any) -> None:
    products(m, 10, 5000.0)
    m.op("aten::unheard_of", (4096, 4096), us=100.0, kernel="mystery")


def test_the_same_gpu_gives_the_same_step() -> None:
    trace = on("NVIDIA H200", steps(ten_products))
    found = elsewhere.elsewhere([trace], machine.find("h200"))
    assert found.expected_busy_s == pytest.approx(found.busy_s)
    assert found.expected_s == pytest.approx(found.step_s, rel=1e-6) and found.busy_s <= found.step_s


@pytest.mark.parametrize("name", ["no_tensor_cores", "unfused_norm", "launch_bound", "pageable_copy"])
def test_the_step_is_the_one_that_explain_has(name: str) -> None:
    """The host runs ahead of the device, or is slowed by the profiler: its own spans are not the step."""
    traces = load.load(Path(__file__).parents[2] / "examples" / "recorded" / "h200" / f"{name}.json.gz")
    found = elsewhere.elsewhere(traces, machine.find("h200"))
    assert found.step_s == explain(traces).step_s
    assert 0 < found.busy_s <= found.step_s and found.expected_s == pytest.approx(found.step_s, rel=0.01)
    faster = elsewhere.elsewhere(traces, machine.find("b200"))
    assert faster.expected_s <= found.expected_s


def test_products_move_with_the_rate_of_products() -> None:
    trace = on("NVIDIA H200", steps(ten_products))
    here = machine.find("h200")
    there = machine.change(here, {"flops": 2.0})
    by_name = {op.name: op for op in elsewhere.elsewhere([trace], there).ops}
    product, other = by_name["aten::mm"], next(op for name, op in by_name.items() if name != "aten::mm")
    assert product.way == "floor" and product.expected_s == pytest.approx(product.recorded_s / 2)
    assert other.way == "memory rate" and other.expected_s == pytest.approx(other.recorded_s)
    wider = machine.change(here, {"bandwidth": 2.0})
    moved = next(op for op in elsewhere.elsewhere([trace], wider).ops if op.name == other.name)
    assert moved.expected_s == pytest.approx(other.recorded_s / 2) and product.calls == 10


def test_a_slower_gpu_is_slower_and_idle_time_stays() -> None:
    trace = on("NVIDIA H200", steps(ten_products))
    slow = elsewhere.elsewhere([trace], machine.find("a100"))
    assert slow.expected_busy_s > 2 * slow.busy_s
    assert slow.expected_s == pytest.approx(slow.expected_busy_s + slow.idle_s)


def test_what_a_launch_bounds_stays() -> None:
    limits = fakes.limits()
    item = Item(row=0, name="small", took_s=3e-6, floor_s=1e-6, bound="launch")
    item.known = OpCost(
        family="pointwise", cost=Cost(read_bytes=8, write_bytes=8), dtype="float32", shape="", output_bytes=8
    )
    seconds, floor_s, way, _ = elsewhere.carried(item, limits, machine.find("b200").limits)
    assert (seconds, way) == (3e-6, "kept") and floor_s <= seconds
    item.took_s = 0.7e-6  # quicker than a launch is taken to be
    here = machine.find("b200").limits
    assert elsewhere.carried(item, here, here)[0] == 0.7e-6


def test_a_trace_without_limits_is_one_line() -> None:
    with pytest.raises(BadInput, match="NVIDIA Z9000, is not in the table, and its limits are needed"):
        elsewhere.elsewhere([on("NVIDIA Z9000", steps(ten_products))], machine.find("b200"))


@pytest.mark.parametrize(
    ("name", "family", "way", "gain"),
    [
        ("record_param_comms", "communication", "link rate", 900e9 / 450e9),  # by NVLink
        ("Memcpy HtoD (Pageable -> Device)", "copy", "kept", 1.0),
    ],
)
def test_what_neither_memory_nor_products_bound(name: str, family: str, way: str, gain: float) -> None:
    """Bytes that go in and out say nothing of a collective's links, nor the bus of a copy that the host makes."""
    limits = [machine.find(gpu).limits for gpu in ("h100", "b200")]
    item = Item(row=0, name=name, family=family, took_s=3e-3, floor_s=1e-3, bound="memory")
    cost = Cost(read_bytes=1 << 30, write_bytes=1 << 30)
    item.known = OpCost(family=family, cost=cost, dtype="float32", shape="", output_bytes=8)
    seconds, _, found, _ = elsewhere.carried(item, *limits)
    assert found == way and seconds == pytest.approx(3e-3 / gain)
    assert elsewhere.carried(item, limits[0], limits[0])[0] == 3e-3
