"""host-sync: what is there for a read alone goes with it; and what of an optimizer's step is the optimizer's."""

from __future__ import annotations

import re

import pytest

from sublight.diagnose import fakes
from sublight.diagnose.fakes import BIG, FP32, Machine
from sublight.diagnose.rules.rules_test import Planted, found, steps


def checking(*ops: str, sequence: int = -1) -> Planted:
    """A value is read each step, behind ops over the whole tensor."""

    def body(m: Machine, step: int) -> None:
        m.lookups(10, us=100.0)
        for name in ops:
            m.op(f"aten::{name}", BIG, us=100.0, sequence=sequence + step if sequence >= 0 else -1)
        m.item()
        m.python(90.0)
        if sequence >= 0:
            m.op("autograd::engine::evaluate_function: MeanBackward0", us=1.0, sequence=sequence + step)

    return steps(body)


@pytest.mark.parametrize(
    ("ops", "sequence", "fed"),
    [
        (("isnan", "any"), -1, ["isnan", "any"]),
        (("eq", "to", "mean"), -1, ["eq", "to", "mean"]),
        (("relu", "isnan", "any"), -1, ["isnan", "any"]),  # the check begins where the work ends
        (("norm",), -1, []),  # what is logged can wait on the device
        (("pow", "mean"), -1, []),
        (("eq", "mean"), 7, []),  # the mean is the loss: the backward pass needs it
    ],
)
def test_ops_that_only_feed_a_read_go_with_it(ops: tuple[str, ...], sequence: int, fed: list[str]) -> None:
    finding = found("host-sync", checking(*ops, sequence=sequence))
    assert finding is not None
    (line,) = [line for line in finding.evidence if "only feed these reads" in line] or [""]
    assert sorted(re.findall(r"aten::(\w+)", line)) == sorted(fed)
    lookups = found("host-sync", checking())
    assert lookups is not None
    assert (finding.saving_s - lookups.saving_s) * 1e6 == pytest.approx(100 * len(fed), abs=10)


def test_a_closures_ops_are_not_the_optimizers() -> None:
    """optimizer.step(closure): forward and backward run inside the optimizer's range, and are the model's."""

    def body(m: Machine, step: int) -> None:
        with m.range("Optimizer.step#LBFGS.step"):
            for n in range(30):
                m.op("aten::addmm", (100, 100), (100, 100), us=20.0, dtype=FP32, sequence=100 * step + n)
            for n in range(30):
                m.op("autograd::engine::evaluate_function: AddmmBackward0", us=20.0, sequence=100 * step + n)
            for _ in range(20):
                m.op("aten::add_", (100, 100), us=5.0, host=20.0, dtype=FP32)

    case = fakes.case(*steps(body))
    assert {case.items[at].name for at in case.in_optimizer} == {"aten::add_"}
    assert len(case.in_optimizer) == 20 * 4


def test_idle_time_of_another_name_that_goes_with_the_waits_is_named() -> None:
    """400 µs of Python while nothing is queued: without the wait the device is still at work then."""

    def body(m: Machine, _: int) -> None:
        m.lookups(10, us=100.0)
        m.item()
        m.python(400.0)

    finding = found("host-sync", steps(body))
    assert finding is not None and finding.saving_s > 300e-6
    assert any(
        re.match("with the host ahead, a step also loses .* of 'idle: other Python'", e) for e in finding.evidence
    )
