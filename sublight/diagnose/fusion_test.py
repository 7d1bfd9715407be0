"""What could be one kernel: found where ops stand in a row over one tensor, never across a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublight.diagnose import explain, fakes, fusion
from sublight.diagnose.case import Case
from sublight.diagnose.fakes import BF16, BIG, FP32, GEMM, PRODUCT, SGEMM, Machine
from sublight.diagnose.fusion import Group
from sublight.diagnose.rules.unfused_attention import UNFUSED_ATTENTION
from sublight.trace.load import load
from sublight.trace.record import Kind

ROWS = (10_000, 1)
SCORES = (64, 2048, 2048)
ENGINE = "autograd::engine::evaluate_function: "


def once(body: Callable[[Machine], Any]) -> Case:
    machine = Machine()
    with machine.step():
        body(machine)
    return fakes.case(machine.trace())


def names(case: Case, group: Group) -> list[str]:
    return [case.items[at].name.removeprefix("aten::") for at in group.items]


def product(m: Machine) -> None:
    m.op("aten::mm", *PRODUCT, us=1250.0, kernel=GEMM)


def passes(m: Machine, *ops: str, us: float = 110.0, **more: Any) -> None:
    for op in ops:
        m.op(f"aten::{op}", BIG, us=us, **more)


def rms_norm(m: Machine, sequence: int = -1) -> None:
    m.op("aten::pow", BIG, (), us=200.0, sequence=sequence)
    m.op("aten::mean", BIG, us=150.0)
    m.op("aten::add", ROWS, (), us=3.0)
    m.op("aten::rsqrt", ROWS, us=3.0)
    m.op("aten::mul", BIG, ROWS, us=200.0)
    m.op("aten::mul", BIG, (10_000,), us=200.0)


def attention(m: Machine, sequence: int = -1, dtype: str = BF16, us: float = 300.0, kernel: str = GEMM) -> None:
    m.op("aten::bmm", (64, 2048, 128), (64, 128, 2048), us=us, kernel=kernel, dtype=dtype)
    m.op("aten::mul", SCORES, (), us=us, dtype=dtype)
    m.op("aten::_softmax", SCORES, us=us, sequence=sequence, dtype=dtype)
    m.op("aten::bmm", SCORES, (64, 2048, 128), us=us, kernel=kernel, dtype=dtype)


# ------------------------------------------------------------------------------------------------ runs


def test_a_chain_between_products_is_one_kernel() -> None:
    case = once(lambda m: (product(m), passes(m, "relu", "neg", "abs"), product(m), passes(m, "exp")))
    (group,) = case.groups
    assert (group.kind, names(case, group)) == ("pointwise", ["relu", "neg", "abs"])
    assert group.floor_s == pytest.approx(100e-6)  # BIG read once, written once
    assert group.fused_s == pytest.approx(100e-6 / fusion.REACHED)


def test_a_product_parts_a_chain() -> None:
    case = once(lambda m: (passes(m, "relu", "neg"), product(m), passes(m, "abs", "exp")))
    assert [names(case, group) for group in case.groups] == [["relu", "neg"], ["abs", "exp"]]


def test_another_size_parts_a_chain() -> None:
    def body(m: Machine) -> None:
        passes(m, "relu", "neg")
        m.op("aten::abs", (10_000, 7_000), us=80.0)
        m.op("aten::exp", (10_000, 7_000), us=80.0)

    case = once(body)
    assert [names(case, group) for group in case.groups] == [["relu", "neg"], ["abs", "exp"]]


def test_two_reductions_of_a_kind_are_apart() -> None:
    """Neither can feed the other: its result is smaller."""
    case = once(lambda m: (passes(m, "relu", "mean"), passes(m, "mean", "neg")))
    assert [names(case, group) for group in case.groups] == [["relu", "mean"], ["mean", "neg"]]


def test_what_reads_nothing_begins_a_chain() -> None:
    """Weights that are drawn one after the other are no chain; what is done to random numbers is."""
    case = once(lambda m: passes(m, "uniform_", "uniform_", "normal_", "mul", "add"))
    assert [names(case, group) for group in case.groups] == [["normal_", "mul", "add"]]


def test_other_streams_are_other_chains() -> None:
    def body(m: Machine) -> None:
        for op, stream in (("relu", 0), ("exp", 1), ("neg", 0), ("abs", 1)):
            passes(m, op, stream=stream)

    case = once(body)
    assert sorted(names(case, group) for group in case.groups) == [["exp", "abs"], ["relu", "neg"]]


def test_a_second_operand_may_come_from_outside() -> None:
    """Whether it does is not known: it counts half, 50 of the 50 µs that reading BIG takes."""

    def body(m: Machine) -> None:
        passes(m, "relu")
        m.op("aten::add", BIG, BIG, us=160.0)

    (group,) = once(body).groups
    assert group.floor_s == pytest.approx((50 + 25 + 50) * 1e-6)


def test_a_fused_kernel_is_no_faster_than_most_of_its_longest_part() -> None:
    (group,) = once(lambda m: (passes(m, "relu"), passes(m, "erfinv", us=500.0))).groups
    assert group.fused_s == pytest.approx(0.8 * 500e-6)


def test_casts_in_a_row_are_copies() -> None:
    def body(m: Machine) -> None:
        for _ in range(2):
            m.op("aten::copy_", BIG, BIG, us=110.0)

    assert [group.kind for group in once(body).groups] == ["copy"]


def test_kernels_that_a_break_kept_apart_are_compiled() -> None:
    def body(m: Machine) -> None:
        for number in range(2):
            m.op(f"triton_poi_fused_add_{number}", BIG, BIG, us=110.0, kernel=f"triton_poi_fused_add_{number}")

    assert [group.kind for group in once(body).groups] == ["compiled"]


def test_a_loop_over_slices_is_many_runs() -> None:
    """Each round softmaxes its own slice: nothing of one round can be fused with the next."""

    def body(m: Machine) -> None:
        for _ in range(5):
            m.op("aten::mul", BIG, (), us=110.0)
            m.op("aten::_softmax", BIG, us=110.0)

    case = once(body)
    assert [names(case, group) for group in case.groups] == [["mul", "_softmax"]] * 5
    straight = once(lambda m: passes(m, *["relu", "neg"] * 5))
    assert [len(group.items) for group in straight.groups] == [10], "without a reduction it is one long chain"


# ------------------------------------------------------------------------------------------------ norms, attention


def test_a_norm_written_out() -> None:
    case = once(lambda m: (product(m), rms_norm(m), product(m)))
    (group,) = case.groups
    assert (group.kind, len(group.items)) == ("norm", 6)
    assert group.floor_s == pytest.approx(100e-6)
    assert group.fused_s == pytest.approx(100e-6 / fusion.NORM_REACHED["forward"])


def test_attention_written_out() -> None:
    case = once(lambda m: (passes(m, "relu"), attention(m), passes(m, "neg")))
    group = next(group for group in case.groups if group.kind == "attention")
    assert names(case, group) == ["bmm", "mul", "_softmax", "bmm"]
    assert group.floor_s == pytest.approx(2 * 2 * 64 * 2048 * 2048 * 128 / 800e12)  # the scores never move
    assert group.fused_s == pytest.approx(group.floor_s / fusion.ATTENTION_REACHED["forward"])


@pytest.mark.parametrize("kernel", [SGEMM, "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n"])
def test_attention_in_float32_is_what_its_kernel_costs(kernel: str) -> None:
    """No kernel of float32 uses TF32, or is a flash kernel: by bfloat16's share it would be ten times as fast."""
    case = once(lambda m: attention(m, dtype=FP32, us=5000.0, kernel=kernel))
    (group,) = case.groups
    flops = 2 * 2 * 64 * 2048 * 2048 * 128
    assert group.fused_s == pytest.approx(flops / 50e12 / fusion.FP32_ATTENTION_REACHED["forward"])
    assert group.floor_s == pytest.approx(flops / (50e12 if kernel == SGEMM else 400e12)), "a floor is no kernel's"
    change = UNFUSED_ATTENTION.check(case)
    assert change is not None
    assert any("runs in float32" in line and "in bfloat16 it is about 14 times" in line for line in change.evidence)
    assert case.saving_s(change.edit) == pytest.approx(20e-3 - group.fused_s, rel=0.06)  # the clock falls a little


def test_float32s_cost_is_that_of_a_recorded_kernel() -> None:
    """The share is of an H200's own recording, not a guess."""
    recorded = Path(__file__).parents[2] / "examples" / "recorded" / "h200"
    limits = str(recorded / "limits.json")
    found = explain.explain(load(recorded / "fp32_model.json.gz"), limits_file=limits)
    rate = found.limits.value("matmul_fp32")
    for name, way in (("forward", "forward"), ("backward", "backward")):
        ops = [op for op in found.ops if op.name == f"aten::_efficient_attention_{name}" and op.dtype == "float32"]
        shares = [op.flops * 9 / 8 / op.device_s / rate for op in ops]  # 36 of 64 tiles of 64 x 64, not half of them
        assert ops and all(share == pytest.approx(fusion.FP32_ATTENTION_REACHED[way], rel=0.05) for share in shares)


@pytest.mark.parametrize("left_out", ["aten::_softmax", "the last product"])
def test_what_lacks_a_part_is_no_attention(left_out: str) -> None:
    def body(m: Machine) -> None:
        m.op("aten::bmm", (64, 2048, 128), (64, 128, 2048), us=300.0, kernel=GEMM)
        if left_out != "aten::_softmax":
            m.op("aten::_softmax", SCORES, us=300.0)
        m.op("aten::sort", SCORES, us=300.0, kernel="sort")  # not to be fused with anything
        m.op("aten::bmm", SCORES, (64, 2048, 128), us=300.0, kernel=GEMM)

    assert once(body).groups == []


@pytest.mark.parametrize(("forward", "kind", "work"), [(rms_norm, "norm", 1.5), (attention, "attention", 2.5)])
def test_the_backward_goes_with_its_forward(forward: Callable[..., None], kind: str, work: float) -> None:
    def body(m: Machine) -> None:
        forward(m, sequence=7)
        product(m)
        m.thread = 1
        for sequence in (7, 8):  # nothing in the forward has the other number
            with m.range(f"{ENGINE}PowBackward0", Kind.OP, sequence=sequence):
                m.op("aten::mul", BIG, BIG, us=200.0)
            product(m)

    case = once(body)
    forward_group, backward = (group for group in case.groups if group.kind == kind)
    assert len(backward.items) == 1 and case.items[backward.items[0]].name == "aten::mul"
    assert backward.floor_s == pytest.approx(work * forward_group.floor_s)
    assert backward.fused_s > work * forward_group.fused_s, "backward kernels reach less of the limit"


def test_a_run_gives_up_what_a_backward_claims() -> None:
    def body(m: Machine) -> None:
        rms_norm(m, sequence=7)
        product(m)
        m.thread = 1
        with m.range(f"{ENGINE}PowBackward0", Kind.OP, sequence=7):
            passes(m, "mul", "neg")
        passes(m, "relu", "abs")

    case = once(body)
    found = {group.kind: names(case, group) for group in case.groups}
    assert found["pointwise"] == ["relu", "abs"]
    everything = [at for group in case.groups for at in group.items]
    assert len(everything) == len(set(everything)), "an item is in one group"


# ------------------------------------------------------------------------------------------------ floors

OPS = st.sampled_from(["relu", "neg", "add", "mean", "rsqrt", "_softmax", "copy_", "mm"])
SHAPES = st.sampled_from([BIG, ROWS, (10_000, 100)])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(OPS, SHAPES, st.floats(2, 400)), min_size=1, max_size=15))
def test_fusion_lowers_the_floor_and_never_below_zero(ops: Sequence[tuple[str, tuple[int, ...], float]]) -> None:
    def body(m: Machine) -> None:
        for name, shape, us in ops:
            dims = PRODUCT if name == "mm" else (shape, shape) if name in ("add", "copy_") else (shape,)
            kernel = GEMM if name == "mm" else fakes.ELEMENTWISE
            m.op(f"aten::{name}", *dims, us=us, kernel=kernel, dtype=FP32 if us > 200 else BF16)

    case = once(body)
    floor_s = case.split.parts["floor"] + case.split.parts["unknown"]
    op_floor_s = floor_s + case.split.parts["fusable"]
    assert 0 <= floor_s <= op_floor_s <= case.step_s
    saved = fusion.saved(case.items, case.groups)
    assert (saved >= 0).all()
    assert all(save <= (item.floor_s or 0.0) for item, save in zip(case.items, saved, strict=True))
    everything = [at for group in case.groups for at in group.items]
    assert len(everything) == len(set(everything))


def test_the_floor_after_fusion_is_the_fused_kernels() -> None:
    case = once(lambda m: (product(m), passes(m, "relu", "neg", "abs", "exp"), product(m)))
    parts = case.split.parts
    assert parts["floor"] + parts["fusable"] == pytest.approx(2400e-6)
    assert parts["floor"] == pytest.approx(2100e-6)
    assert case.floor_after_s(case.model) == pytest.approx(2100e-6)
