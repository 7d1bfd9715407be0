"""Each rule on a trace with its cause planted, its saving worked out by hand, and on one that only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sublight.diagnose import fakes
from sublight.diagnose.fakes import BF16, BIG, FP32, GEMM, PRODUCT, SGEMM, Machine
from sublight.diagnose.record import Finding
from sublight.diagnose.rules import RULES, signatures_test
from sublight.trace.record import Kind, Trace

IDS = (  # as the project promises them
    *("launch-bound", "host-sync", "data-loading", "host-bound", "pageable-copy", "exposed-copy", "no-tensor-cores"),
    *("unfused-pointwise", "unfused-attention", "unfused-norm", "unfused-optimizer", "allocator-thrash"),
    *("redundant-cast-or-copy", "small-grid", "slow-kernel", "exposed-communication", "rank-imbalance"),
    *("recompilation", "graph-break", "fp32-where-bf16-serves", "start-up"),
    *("anomaly-mode", "repeated-line", "dense-embedding", "worker-restart", "weight-bound"),
    *("float64-by-accident", "growing-cat", "needless-autograd"),
)
BY_ID = {rule.id: rule for rule in RULES}
MB = 1_000_000
TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n"
HALF = ((400, 10_000), (10_000, 10_000))  # in float32: 1.6 ms on ordinary cores, 0.2 ms as TF32
Body = Callable[[Machine, int], Any]  # what one step does, by its number
Planted = tuple[Trace, ...]  # the first is explained, the others are its fellow ranks


def steps(body: Body, count: int = 4, **more: Any) -> Planted:
    machine = Machine()
    for number in range(count):
        with machine.step():
            body(machine, number)
    return (machine.trace(**more),)


def found(rule_id: str, traces: Planted) -> Finding | None:
    findings, _ = fakes.findings(fakes.case(*traces), [BY_ID[rule_id]])
    assert all(finding.id == rule_id for finding in findings)
    return findings[0] if findings else None


def small(us: float, host: float, **more: Any) -> Planted:
    return steps(lambda m, _: m.lookups(50, us=us, host=host), **more)


def synced(every: int) -> Planted:
    def body(m: Machine, number: int) -> None:
        m.lookups(10)
        if number % every == 1 % every:  # not in the first step, which is warm-up if it is longer
            m.item()
            m.python(90.0)

    return steps(body)


def loading(us: float) -> Planted:
    return steps(lambda m, _: (m.load(us), m.lookups(10)))


def thinking(us: float) -> Planted:
    return steps(lambda m, _: (m.python(us), m.lookups(10)))


def copying(us: float, size: int, memory: str, **more: Any) -> Planted:
    return steps(lambda m, _: (m.copy(us, size, memory, **more), m.lookups(10)))


def single(kernel: str, us: float, dtype: str = FP32) -> Planted:
    return steps(lambda m, _: [m.op("aten::mm", *HALF, us=us, kernel=kernel, dtype=dtype) for _ in range(10)])


def chain(*, apart: bool) -> Planted:
    def body(m: Machine, _: int) -> None:
        for name in ("aten::relu", "aten::neg", "aten::abs", "aten::sigmoid"):
            m.op(name, BIG, us=110.0)
            if apart:
                m.lookups(1)
        m.lookups(10)

    return steps(body)


def attention(last: str) -> Planted:
    scores = (64, 2048, 2048)

    def body(m: Machine, _: int) -> None:
        m.lookups(10, us=300.0)
        m.op("aten::bmm", (64, 2048, 128), (64, 128, 2048), us=300.0, kernel=GEMM)
        m.op("aten::mul", scores, (), us=300.0)
        m.op("aten::_softmax", scores, us=300.0)
        if last == "aten::bmm":
            m.op(last, scores, (64, 2048, 128), us=300.0, kernel=GEMM)
        else:
            m.op(last, scores, us=300.0)

    return steps(body)


def appending(added: int, *, from_before: bool = True) -> Planted:
    """A key and a value that each layer makes longer; or tensors of one length, joined with short ones."""

    def body(m: Machine, number: int) -> None:
        m.lookups(10)
        length = 1000 + added * number if from_before else 1000
        for _ in range(4):
            m.op("aten::cat", ((16, length, 64), (16, added, 64)), (), us=150.0)

    return steps(body)


def recorded(*, grows: bool) -> Planted:
    """Ops with the number of autograd's last node, as each adds one, or as none does."""
    machine, number = Machine(), 0
    for _ in range(4):
        with machine.step():
            for _ in range(50):
                machine.lookups(1, us=3.0, host=20.0, sequence=number)
                number += grows
    return (machine.trace(),)


def norm(root: str) -> Planted:
    def body(m: Machine, _: int) -> None:
        m.lookups(10)
        m.op("aten::pow", BIG, (), us=200.0)
        m.op("aten::mean", BIG, us=150.0)
        m.op("aten::add", (10_000, 1), (), us=3.0)
        m.op(root, (10_000, 1), us=3.0)
        m.op("aten::mul", BIG, (10_000, 1), us=200.0)
        m.op("aten::mul", BIG, (10_000,), us=200.0)

    return steps(body)


def optimizer(*names: str, us: float = 5.0) -> Planted:
    def body(m: Machine, _: int) -> None:
        m.lookups(10)
        with m.range("Optimizer.step#AdamW.step"):
            for name in names:
                for _ in range(20):
                    m.op(name, (1000, 1000), us=us, host=20.0, dtype=FP32)

    return steps(body)


def allocating(every: int) -> Planted:
    def body(m: Machine, number: int) -> None:
        m.lookups(10)
        if number % every == 1 % every:
            m.sync(300.0, name="cudaFree")
            m.call("cudaMalloc", 300.0)

    return steps(body, 5)


def casting(us: float) -> Planted:
    def body(m: Machine, _: int) -> None:
        for _ in range(4):
            with m.range("aten::to", Kind.OP):
                m.op("aten::copy_", BIG, BIG, us=us)
            m.lookups(1)

    return steps(body)


def blocks(grid: int) -> Planted:
    return steps(lambda m, _: (m.lookups(10), m.op("mylib::scan", us=1320.0, kernel="scan", grid=grid)))


def relu(us: float) -> Planted:
    return steps(lambda m, _: (m.lookups(10), m.op("aten::relu", BIG, us=us)))


def talking(*, waited_for: bool) -> Planted:
    def body(m: Machine, _: int) -> None:
        m.lookups(9)
        m.op("record_param_comms", us=500.0, kernel="ncclDevKernel_AllReduce_Sum_bf16", stream=1, after=0)
        m.lookups(1, after=1 if waited_for else None)

    return steps(body)


def talk(m: Machine, us: float) -> None:
    with m.range("gloo:all_reduce"):
        m.python(us)


def one_rank(number: int, us: float) -> Trace:
    return steps(lambda m, _: m.lookups(10, us=us), rank=number)[0]


def compiling(*, every: int) -> Planted:
    def body(m: Machine, number: int) -> None:
        if number % every == 0:
            with m.range("_compile.compile_inner (dynamo_timed)"):
                m.python(5000.0)
        m.lookups(10)

    return steps(body)


def regions(count: int, *, between: int = 0, behind: int = 0) -> Planted:
    """Pieces with Python behind each, and products that no piece holds: between them, and behind the last."""

    def body(m: Machine, _: int) -> None:
        for number in range(count):
            with m.range(f"Torch-Compiled Region: {number}/0", Kind.OP):
                m.lookups(2, us=20.0)
            m.python(300.0)
            m.lookups(between if number < count - 1 else behind, us=20.0, host=30.0)

    return steps(body)


def starting(every: int) -> Planted:
    def body(m: Machine, number: int) -> None:
        m.lookups(5)
        if number % every == every - 1:
            m.call("cudaStreamCreateWithFlags", 40_000.0)
        m.lookups(5)

    return steps(body)


def decoding(rows: int) -> Planted:
    """A token's products with weights of 4096x14336 in bfloat16, 100 µs each."""
    sizes = ((rows, 4096), (4096, 14336))
    return steps(lambda m, _: [m.op("aten::mm", *sizes, us=100.0, kernel="gemvx::kernel") for _ in range(10)])


PLANTED: dict[str, tuple[Planted, float]] = {
    # 50 launches of 40 µs, 3 µs each on the device; as a graph 10 µs and 50 × (3 + 0.7)
    "launch-bound": (small(3.0, 40.0, unprofiled_step_s=[2e-3]), 2000 - 195),
    # a step ends 90 µs of host after the wait; without it, the device's 1000 µs
    "host-sync": (synced(1), 1099.5 - 1000),
    "data-loading": (loading(2000.0), 2080 - 1000),
    "host-bound": (thinking(2000.0), 2080 - 1000),
    "pageable-copy": (copying(1000.0, 10 * MB, "Pageable", blocking=True), 2007.5 - 1000),
    "exposed-copy": (copying(200.0, 10 * MB, "Pinned"), 200),
    "no-tensor-cores": (single(SGEMM, 2000.0), 10 * 2000 * (1 - 1 / 8)),
    "unfused-pointwise": (chain(apart=False), 4 * 110 - 100 / 0.88),
    # two products of 6.87e10 at half of 800 TFLOP/s
    "unfused-attention": (attention("aten::bmm"), 1200 - 2 * 2 * 64 * 2048 * 2048 * 128 / 800e12 / 0.5 * 1e6),
    "unfused-norm": (norm("aten::rsqrt"), 756 - 100 / 0.45),
    # 80 launches of 20 µs behind 80 µs of others; fused: 7 × 80 MB
    "unfused-optimizer": (
        optimizer("aten::lerp_", "aten::addcmul_", "aten::sqrt", "aten::addcdiv_"),
        1680 - 1000 - 7 * 80 * MB / 4e12 / 0.8 * 1e6,
    ),
    "allocator-thrash": (allocating(1), 606.5),
    "redundant-cast-or-copy": (casting(150.0), 4 * 150),
    "small-grid": (blocks(8), 1320 * (1 - 8 / 132)),
    "slow-kernel": (relu(1000.0), 1000 - 100 / 0.8),
    "exposed-communication": (talking(waited_for=True), 500),
    "rank-imbalance": ((one_rank(0, 100.0), one_rank(1, 50.0)), 1000 - 750),
    "recompilation": (compiling(every=1), 5080 - 1000),
    "graph-break": (regions(3), 2 * 300),
    # half of the time, and a cast of each weight, 100 million elements, 4 bytes read and 2 written
    "fp32-where-bf16-serves": (single(TF32, 500.0), 10 * (250 - 1e8 * 6 / 4e12 / 0.88 * 1e6)),
    "start-up": (starting(every=4), (40_000 - 3_680) / 4),  # less what the device has queued up when it begins
    "weight-bound": (decoding(1), 10 * 100 * (1 - 0.43)),  # the share that was measured at one row
    # vector work in float32 is as fast here: half of the bytes, half of the time
    "float64-by-accident": (steps(lambda m, _: m.op("aten::relu", BIG, us=800.0, dtype="double")), 400),
    "growing-cat": (appending(1), 600 - 4 * 150 / 1002),
    "needless-autograd": (recorded(grows=True), 50 * 0.75),
    **{name: ((trace,), saving_us) for name, (trace, saving_us) in signatures_test.PLANTED.items()},
}
NEAR_MISSES: dict[str, Planted] = {
    "launch-bound": small(60.0, 40.0, unprofiled_step_s=[3e-3]),  # as slow a host, hidden by the device
    "host-sync": synced(4),
    "data-loading": loading(300.0),
    "host-bound": thinking(300.0),
    "pageable-copy": copying(10.0, 4096, "Pageable", blocking=True),  # a sync, that is
    "exposed-copy": copying(200.0, 10 * MB, "Pinned", stream=1),  # beside the work
    "no-tensor-cores": single(TF32, 500.0),
    "unfused-pointwise": chain(apart=True),
    "unfused-attention": attention("aten::neg"),
    "unfused-norm": norm("aten::exp"),
    "unfused-optimizer": optimizer("aten::_fused_adamw_", us=40.0),
    "allocator-thrash": allocating(5),
    "redundant-cast-or-copy": casting(4.0),
    "small-grid": blocks(100),
    "slow-kernel": relu(400.0),
    "exposed-communication": talking(waited_for=False),
    "rank-imbalance": (one_rank(0, 100.0), one_rank(1, 97.0)),
    "recompilation": compiling(every=4),  # in the first step alone: warm-up
    "graph-break": regions(2),  # two compiled functions, and no break was recorded
    "fp32-where-bf16-serves": single(GEMM, 500.0, BF16),
    "start-up": starting(every=1),  # in every step: that is how the step is
    "weight-bound": decoding(64),  # 4 bits were no faster there
    "float64-by-accident": steps(lambda m, _: m.op("aten::relu", BIG, us=800.0, dtype=FP32)),
    "growing-cat": appending(1, from_before=False),
    "needless-autograd": recorded(grows=False),
    **{name: (trace,) for name, trace in signatures_test.NEAR_MISSES.items()},
}


def test_the_ids_are_those_that_were_promised() -> None:
    assert tuple(rule.id for rule in RULES) == IDS
    assert set(PLANTED) == set(NEAR_MISSES) == set(IDS)


@pytest.mark.parametrize("rule_id", IDS)
def test_a_planted_cause_is_found_with_its_saving(rule_id: str) -> None:
    traces, saving_us = PLANTED[rule_id]
    finding = found(rule_id, traces)
    assert finding is not None
    assert finding.saving_s * 1e6 == pytest.approx(saving_us, rel=0.02)
    assert finding.title and finding.fix and all(finding.evidence) and "\n" not in finding.title


@pytest.mark.parametrize("rule_id", IDS)
def test_what_only_looks_like_it_is_not_found(rule_id: str) -> None:
    assert found(rule_id, NEAR_MISSES[rule_id]) is None


@pytest.mark.parametrize(
    ("rule_id", "body", "saving_us"),
    [
        ("data-loading", lambda m: m.load(3000.0), 3000),
        ("host-bound", lambda m: m.python(3000.0), 3000),
        ("exposed-communication", lambda m: talk(m, 3000.0), 1500 + 500),  # half of it, and what 500 µs of work hide
        ("launch-bound", lambda m: [(m.python(40.0), m.work("aten::relu", (64, 64), us=2.0)) for _ in range(50)], 1600),
    ],
)
def test_on_a_cpu(rule_id: str, body: Callable[[Machine], Any], saving_us: float) -> None:
    def step(m: Machine, _: int) -> None:
        body(m)
        m.work("aten::mm", (1000, 1000), (1000, 1000), us=500.0)

    finding = found(rule_id, steps(step))
    assert finding is not None
    assert finding.saving_s * 1e6 == pytest.approx(saving_us, rel=0.1)


@pytest.mark.parametrize("planted", [*(traces for traces, _ in PLANTED.values())], ids=list(PLANTED))
def test_no_rule_needs_limits_or_fails_on_anothers_trace(planted: Planted) -> None:
    for case in (fakes.case(*planted), fakes.without_limits(planted[0])):
        for rule in RULES:
            findings, combined = fakes.findings(case, [rule])
            assert all(0 <= finding.saving_s <= case.step_s for finding in findings)
            assert 0 <= combined <= case.step_s


def test_products_that_fill_more_of_a_step_run_slower() -> None:
    """At half of the step they ran 1000 µs; alone they draw more power, 0.35 × the share that they gain."""
    traces = steps(lambda m, _: (m.op("aten::mm", *PRODUCT, us=1000.0, kernel=GEMM), m.load(1992.0)))
    finding = found("data-loading", traces)
    assert finding is not None
    assert finding.saving_s * 1e6 == pytest.approx(2000 - 1000 * (1 + 0.35 * 0.5), rel=0.01)
