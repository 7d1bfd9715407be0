"""Compiling is advised where it pays, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from sublight.diagnose import advice, fakes
from sublight.diagnose.fakes import BIG, Machine
from sublight.diagnose.record import Finding
from sublight.diagnose.rules.launch_bound import LAUNCH_BOUND
from sublight.diagnose.rules.unfused_pointwise import UNFUSED_POINTWISE
from sublight.trace.record import Trace


def chain(work: int = 5, grows: bool = False, compiled: bool = False) -> Trace:
    """Four passes over a tensor that could be one, beside `work` times 100 µs of other kernels."""
    machine = Machine()
    for number in range(4):
        shape = (BIG[0] + 100 * number, BIG[1]) if grows else BIG
        with machine.step():
            machine.lookups(work)
            for name in ("aten::relu", "aten::neg", "aten::abs", "aten::sigmoid"):
                machine.op(name, shape, us=110.0)
            if compiled:
                machine.op("aten::mm", (64, 64), (64, 64), us=3.0, kernel="triton_poi_fused_add_0")
    return machine.trace()


def finding(trace: Trace, rule: Any = UNFUSED_POINTWISE) -> Finding:
    return fakes.findings(fakes.case(trace), [rule])[0][0]


def test_a_chain_that_is_a_good_part_of_the_step_is_worth_compiling() -> None:
    assert "torch.compile" in finding(chain()).fix


@pytest.mark.parametrize(
    ("trace", "why"),
    [
        (chain(work=150), "for so little"),
        (chain(grows=True), "shapes differ"),
        (chain(compiled=True), "compiled already"),
    ],
)
def test_where_it_is_known_to_lose_it_is_no_advice(trace: Trace, why: str) -> None:
    found = finding(trace)
    assert "torch.compile" not in found.fix
    assert any(why in line for line in found.evidence)


def test_a_cpu_is_not_told_to_compile() -> None:
    machine = Machine()
    for _ in range(4):
        with machine.step():
            for _ in range(50):
                machine.python(40.0)
                machine.work("aten::relu", (64, 64), us=2.0)
    found = finding(machine.trace(), LAUNCH_BOUND)
    assert "torch.compile" not in found.fix and advice.no_compiling(fakes.case(machine.trace()))


def test_a_graph_of_shapes_that_change_is_one_a_size() -> None:
    machine = Machine()
    for number in range(4):
        with machine.step():
            machine.op("aten::relu", (100 + number, 100), us=3.0, host=40.0)
            machine.lookups(3, us=3.0, host=40.0)
    found = finding(machine.trace(), LAUNCH_BOUND)
    assert "torch.compile" not in found.fix and "CUDAGraph" in found.fix and "pad them" in found.fix
