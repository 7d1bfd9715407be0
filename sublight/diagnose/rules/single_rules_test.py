"""Single rules, in more than a trace that has their cause and one that only looks like it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sublight.diagnose.autocast import FULL_PRECISION
from sublight.diagnose.fakes import BIG, FP32, GEMM, PRODUCT, SGEMM, Machine
from sublight.diagnose.rules import unfused_pointwise
from sublight.diagnose.rules.rules_test import MB, TF32, attention, found, regions, single, steps
from sublight.trace.record import Kind

CAST_US = 6 / 4e12 / 0.88 * 1e6  # of one element: 4 bytes read, 2 written


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
    finding = found("fp32-where-bf16-serves", single(SGEMM, 4000.0))
    assert finding is not None
    assert finding.saving_s * 1e6 == pytest.approx(10 * (4000 / 8 / 2 - 1e8 * CAST_US), rel=0.1)


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
        m.op("aten::mm", *PRODUCT, us=1000.0, kernel=TF32, dtype=FP32)
        m.op("aten::relu", PRODUCT[0], us=400.0, dtype=FP32)  # of what the product gave: bfloat16
        m.op("aten::add", PRODUCT[0], (10_000,), us=600.0, dtype=FP32)  # of it and a float32 bias: float32
        m.op("aten::sigmoid", BIG, us=400.0)  # in bfloat16 already
        with m.range("Optimizer.step#SGD.step"):
            m.op("aten::add_", BIG, BIG, us=400.0, dtype=FP32)  # stays in float32

    finding = found("fp32-where-bf16-serves", steps(body))
    assert finding is not None
    sums_us = 600 * (1 - (2 + 4) / (4 + 4))  # reads half, writes all
    assert finding.saving_s * 1e6 == pytest.approx(1000 / 2 + 400 / 2 + sums_us - 1.4e8 * CAST_US, rel=0.02)


def test_a_softmax_stays_in_float32_and_gets_casts() -> None:
    """Autocast casts the scores to float32, works in float32, and casts what it gives to bfloat16."""

    def body(m: Machine, _: int) -> None:
        m.op("aten::mm", *PRODUCT, us=2000.0, kernel=TF32, dtype=FP32)
        m.op("aten::_softmax", PRODUCT[0], us=400.0, dtype=FP32)
        m.op("aten::mm", *PRODUCT, us=2000.0, kernel=TF32, dtype=FP32)

    finding = found("fp32-where-bf16-serves", steps(body))
    assert finding is not None
    casts_us = (1.4e8 + 4e7 + 1.4e8) * CAST_US  # both operands of a product, twice; the scores in between
    assert finding.saving_s * 1e6 == pytest.approx(2 * 2000 / 2 - casts_us, rel=0.02)


def test_the_ops_that_autocast_keeps_in_float32_are_pytorchs() -> None:
    torch = pytest.importorskip("torch")
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this build of PyTorch comes without headers")
    text = header.read_text(encoding="utf-8")
    lists = re.findall(r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)((?:.*\\\n)*.*)", text)
    theirs = {name for each in lists for name in re.findall(r"_\((\w+)", each)}
    upsampling = {name for name in theirs if "upsample" in name}
    assert theirs - upsampling - set(FULL_PRECISION) == set()
    assert set(FULL_PRECISION) - theirs <= {"norm"}  # which has a list of its own


def test_a_batch_that_comes_again_is_pinned_in_place_and_a_new_one_is_copied_first() -> None:
    """The host's copy of 10 MB at three transfers a byte, 100 GB/s for two: 150 µs; the device waits for it, and for
    the copy over the link: 200 µs at 50 GB/s."""

    def body(m: Machine, *, makes: bool) -> None:
        if makes:
            with m.range("<built-in method from_numpy of type object>", Kind.PYTHON):
                m.python(1.0)
        m.copy(1000.0, 10 * MB, blocking=True)
        m.lookups(10)
        m.item()

    def cured_us(makes: bool) -> float:
        finding = found("pageable-copy", steps(lambda m, _: body(m, makes=makes)))
        assert finding is not None
        return 1e6 * (finding.saving_s - finding.cure_savings_s["pinned copies"])

    again_us, new_us = cured_us(False), cured_us(True)
    assert again_us == pytest.approx(200.0, abs=30)  # the fix copies a step ahead, the cure when it is asked for
    assert new_us == pytest.approx(again_us + 150.0, abs=15)


def test_compiling_leaves_the_products_of_attention() -> None:
    """A scale and a softmax over 537 MB of scores, 300 µs each, become one kernel that reads and writes them."""
    finding = found("unfused-attention", attention("aten::bmm"))
    assert finding is not None
    one_us = 2 * 2 * 64 * 2048 * 2048 / 4e12 / 0.88 * 1e6
    assert finding.cure_savings_s["compile"] * 1e6 == pytest.approx(600 - one_us, rel=0.02)


def test_workers_that_start_anew_in_short_epochs_save_little() -> None:
    """Of 4 batches of 40 ms an epoch: three workers are started, 15 ms each, and the first batch is waited for."""

    def saving_s(in_epoch: int) -> float:
        def body(m: Machine, number: int) -> None:
            if number % in_epoch == in_epoch - 1:
                m.load(20.0)  # the call that finds no batch left
            m.load(40_000.0)
            m.lookups(200)
            m.item()  # so that nothing hides the loading

        finding = found("data-loading", steps(body, count=9, cores=4))
        assert finding is not None
        assert ("persistent_workers" in finding.fix) == (in_epoch < 9)
        return finding.cure_savings_s["loader workers"]

    whole_s = 40e-3
    assert saving_s(100) == pytest.approx(whole_s, rel=0.05)
    assert saving_s(4) == pytest.approx(whole_s - (3 * 15e-3 + whole_s) / 4.5, rel=0.05)  # two ends in nine batches


def test_an_optimizer_that_has_no_lists_of_tensors_is_not_told_to_use_them() -> None:
    def body(m: Machine, name: str) -> None:
        m.lookups(10)
        with m.range(f"Optimizer.step#{name}.step"):
            for _ in range(20):
                m.op("aten::mul_", (1000, 1000), us=20.0, dtype=FP32)

    assert found("unfused-optimizer", steps(lambda m, _: body(m, "RMSprop"))) is not None
    assert found("unfused-optimizer", steps(lambda m, _: body(m, "LBFGS"))) is None


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
