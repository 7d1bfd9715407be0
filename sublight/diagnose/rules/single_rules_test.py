"""Single rules, in more than a trace that has their cause and one that only looks like it."""

from __future__ import annotations

import pytest

from sublight.diagnose import fakes
from sublight.diagnose.fakes import BIG, FP32, GEMM, SGEMM, Machine
from sublight.diagnose.rules import unfused_pointwise
from sublight.diagnose.rules.rules_test import HALF, MB, TF32, found, regions, single, steps


def test_a_break_takes_the_host_time_between_the_pieces_and_no_other() -> None:
    """Between: 300 µs, 4 launches of 30 µs that no longer cost the host 5 µs each. Behind the last piece: its own."""
    finding = found("graph-break", regions(3, between=4, behind=20))
    assert finding is not None
    assert finding.saving_s * 1e6 == pytest.approx(2 * (300 + 4 * 27), rel=0.1)


@pytest.mark.parametrize(("width", "fix"), [(50_257, "sublight.patch("), (50_304, "# another kernel")])
def test_a_slow_product_of_odd_sizes_has_a_fix_of_ours(width: int, fix: str) -> None:
    sizes = ((8_192, 768), (768, width))
    finding = found("slow-kernel", steps(lambda m, _: [m.op("aten::mm", *sizes, us=6_600.0, kernel=GEMM)]))
    assert finding is not None and finding.fix.startswith(fix)


def test_bfloat16_is_counted_on_top_of_the_tensor_cores() -> None:
    finding = found("fp32-where-bf16-serves", single(SGEMM, 2000.0))
    assert finding is not None
    assert finding.saving_s * 1e6 == pytest.approx(10 * 2000 / 8 * (1 - 0.55), rel=0.1)


def test_an_optimizers_launches_are_its_own_finding() -> None:
    """Half of the host's launching is the optimizer's: launch-bound claims no more than the other half."""

    def body(m: Machine, _: int) -> None:
        m.lookups(40, 3.0, host=20.0)
        with m.range("Optimizer.step#AdamW.step"):
            for name in ("aten::lerp_", "aten::addcdiv_"):
                for _ in range(20):
                    m.op(name, (100, 100), us=3.0, host=20.0, dtype=FP32)

    finding = found("launch-bound", steps(body))
    assert finding is not None
    assert finding.saving_s * 1e6 == pytest.approx(80 * 17 / 2, rel=0.02)


def test_bfloat16_halves_what_float32_ops_move() -> None:
    def body(m: Machine, _: int) -> None:
        m.op("aten::mm", *HALF, us=500.0, kernel=TF32, dtype=FP32)
        m.op("aten::relu", BIG, us=400.0, dtype=FP32)
        m.op("aten::sigmoid", BIG, us=400.0)  # in bfloat16 already
        with m.range("Optimizer.step#SGD.step"):
            m.op("aten::add_", BIG, BIG, us=400.0, dtype=FP32)  # stays in float32

    finding = found("fp32-where-bf16-serves", steps(body))
    assert finding is not None
    assert finding.saving_s * 1e6 == pytest.approx((500 + 400) * (1 - 0.55), rel=0.02)


def test_a_softmax_stays_in_float32_and_gets_casts() -> None:
    """Autocast reads scores in bfloat16, works in float32 and writes weights in bfloat16: more bytes than before."""

    def body(m: Machine, _: int) -> None:
        m.op("aten::mm", *HALF, us=2000.0, kernel=TF32, dtype=FP32)
        m.op("aten::_softmax", BIG, us=400.0, dtype=FP32)

    traces = steps(body)
    case, finding = fakes.case(*traces), found("fp32-where-bf16-serves", traces)
    floor = sum(case.split.floor_s[at] for at, item in enumerate(case.items) if item.family == "softmax")
    assert finding is not None and floor > 1e-6
    assert finding.saving_s == pytest.approx(2000e-6 * (1 - 0.55) - 1.5 * floor, rel=0.02)


@pytest.mark.parametrize(
    ("ops", "word", "absent"),
    [
        (("aten::mul", "aten::tanh", "aten::add"), 'F.gelu(x, approximate="tanh")', "silu"),
        (("aten::sigmoid", "aten::mul"), "F.silu(x)", "addcmul"),
        (("aten::sub", "aten::gt", "aten::mean"), "# ops that end in _", "y ="),
    ],
)
def test_a_chain_gets_the_code_of_its_own_ops(ops: tuple[str, ...], word: str, absent: str) -> None:
    assert word in unfused_pointwise.by_hand(ops) and absent not in unfused_pointwise.by_hand(ops)


def test_pinned_copies_hold_up_nobody() -> None:
    """Copy, 900 µs of Python, work: one after the other; then the host's 990 and the device's 1000 at once."""
    traces = steps(lambda m, _: (m.copy(1000.0, 10 * MB, blocking=True), m.python(900.0), m.lookups(10)))
    finding = found("pageable-copy", traces)
    assert finding is not None
    assert finding.saving_s * 1e6 == pytest.approx(2907.5 - 1000, rel=0.02)


def test_a_wait_that_finds_the_device_idle_is_no_sync() -> None:
    def body(m: Machine, _: int) -> None:
        m.lookups(10, us=20.0)
        m.python(3000.0)
        m.sync()

    assert found("host-sync", steps(body)) is None
