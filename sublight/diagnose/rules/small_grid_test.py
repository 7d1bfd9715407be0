"""small-grid: a loop over pieces of a tensor could be one op; a network's layers could not."""

from __future__ import annotations

import pytest

from sublight.diagnose.fakes import GEMM, Machine
from sublight.diagnose.rules.rules_test import Planted, found, steps
from sublight.trace.record import Kind


def looping(*, sliced: bool = False, apart: bool = False, joined: bool = False, gate: bool = False) -> Planted:
    """16 small products a step, over the pieces of a tensor, or as the layers of a network."""

    def body(m: Machine, _: int) -> None:
        m.lookups(10)
        if apart:
            m.op("aten::unbind", (16, 64, 64), us=0.0)
        for _ in range(16):
            if sliced:
                with m.range("aten::select", Kind.OP):
                    m.python(0.1)
            m.op("aten::mm", (64, 64), (64, 64), us=40.0, kernel=GEMM, grid=4)
            m.op("aten::tanh" if gate else "aten::add", (64, 64), (64, 64), us=30.0)
        if joined:
            m.op("aten::stack", ((64, 64),) * 16, us=5.0)

    return steps(body)


@pytest.mark.parametrize("over", [{"sliced": True}, {"joined": True}])
def test_a_loop_of_small_kernels_is_done_at_once(over: dict[str, bool]) -> None:
    finding = found("small-grid", looping(**over))
    assert finding is not None
    # side by side, the products take 4 of 132 SMs each; the sums, at 60 % of a launch's floor, 1 / 0.6 µs
    assert finding.saving_s * 1e6 == pytest.approx(16 * (70 - 1 / 0.6 - 1 / 0.6), rel=0.05)


@pytest.mark.parametrize("over", [{}, {"sliced": True, "gate": True}])
def test_layers_and_recurrent_cells_are_no_loop_that_could_be_batched(over: dict[str, bool]) -> None:
    """Each needs the one before: only the time of the small kernels themselves could be less."""
    finding = found("small-grid", looping(**over))
    assert finding is not None
    assert finding.saving_s * 1e6 == pytest.approx(16 * (40 - 1 / 0.6), rel=0.05)
