"""Causes known by their signature: each planted, with what the same machine takes without it, and one that is alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sublight.diagnose import fakes
from sublight.diagnose.case import Rule
from sublight.diagnose.fakes import FP32, Machine
from sublight.diagnose.record import Finding
from sublight.diagnose.rules import repeated_line
from sublight.diagnose.rules.anomaly_mode import ANOMALY_MODE
from sublight.diagnose.rules.dense_embedding import DENSE_EMBEDDING
from sublight.diagnose.rules.repeated_line import REPEATED_LINE
from sublight.diagnose.rules.slow_kernel import SLOW_KERNEL
from sublight.trace.attribute import ENGINE
from sublight.trace.record import Kind, Trace

ROWS = 128


def backward(*, checks: int) -> Trace:
    """Eight nodes a step, so many of them followed by a check for NaN."""
    machine = Machine()
    for _ in range(4):
        with machine.step():
            machine.lookups(5)
            for node in range(8):
                with machine.range(f"{ENGINE}: MulBackward0", Kind.OP):
                    machine.op("aten::mul", (1_000, 1_000), (1_000, 1_000), us=20.0)
                    if node < checks:
                        machine.op("aten::isnan", (1_000, 1_000), us=5.0)
                        machine.op("aten::any", (1_000, 1_000), us=5.0)
                        machine.item()
    return machine.trace()


def looped(
    *, rounds: int, us: float, modules: int = 1, gates: bool = False, sliced: bool = True, backward: bool = False
) -> Trace:
    """One line of two ops, so often, of so many modules in turn, each time on a slice; `backward`: one op for each."""
    names = ("aten::linear", "aten::tanh") if gates else ("aten::mul", "aten::relu")
    dims: Any = [((16, 32), (32, 32)), ((16, 32),)] if gates else [((64,),), ((64,),)]
    machine = Machine()
    for step in range(4):
        with machine.step():
            machine.lookups(2)
            numbers = range(step * rounds, (step + 1) * rounds)
            for number in numbers:
                if sliced:
                    with machine.range("aten::select", Kind.OP):
                        machine.python(1.0)
                for name, shapes in zip(names, dims, strict=True):
                    machine.op(name, *shapes, us=us, dtype=FP32, host=20.0, sequence=number)
            for number in numbers if backward else ():
                with machine.range(f"{ENGINE}: MulBackward0", Kind.OP, sequence=number):
                    machine.op("aten::mul", (64,), us=us, dtype=FP32, host=20.0)
            machine.sync()
    count = 2 * rounds
    sources = {
        "ops": list(names),
        "index": [0, 1] * rounds,
        "source": ["train.py:8"] * count,
        "module": [f"layers.{number // 2 % modules}" for number in range(count)],
    }
    return machine.trace(sources=sources)


def embedded(*, indices: int, gradient_us: float = 100.0, update_us: float = 500.0) -> Trace:
    machine = Machine()
    for _ in range(4):
        with machine.step():
            machine.op("aten::embedding", (1_000_000, 64), (indices,), us=20.0, dtype=FP32, kernel="embedding")
            machine.lookups(2)
            machine.op("aten::embedding_dense_backward", (indices, 64), (indices,), us=gradient_us, dtype=FP32)
            with machine.range("Optimizer.step#Adam.step"):
                machine.op("aten::_fused_adam_", ((1_000_000, 64),), us=update_us, dtype=FP32)
    return machine.trace()


def loading(*, restarts: int) -> Trace:
    """Steps of 2 ms of work and one of Python; 30 looks of 1 ms during ten others, so many at workers that start."""
    machine = Machine()
    for _ in range(4):
        with machine.step():
            machine.python(1_000.0)
            machine.lookups(20)
            machine.sync()
    main = ["train.py", "<module>", 3, 1]
    init = ["torch/utils/data/dataloader.py", "_MultiProcessingDataLoaderIter.__init__", 9, 1]
    samples = {
        "frames": [main, init],
        "stacks": [[0], [0, 1]],
        "threads": ["MainThread"],
        "labels": ["timed"],
        "rows": [[0, 0, int(look < restarts), 1_000_000, 1_000_000, 0] for look in range(30)],
        "look_s": 0.0,
        "mine": [True, False],
        "steps": {"timed": 10},
    }
    return machine.trace(samples=samples)


def step_us(trace: Trace) -> float:
    return fakes.case(trace).step_s * 1e6


def found(rule: Rule, trace: Trace) -> Finding | None:
    findings, _ = fakes.findings(fakes.case(trace), [rule])
    return findings[0] if findings else None


def batched_us() -> float:
    """What one op over all rounds takes: the sum of what each would take at 60 % of its limit, where that is less."""
    floor_s = next(item.floor_s for item in fakes.case(looped(rounds=ROWS, us=3.0)).items if item.name == "aten::mul")
    assert floor_s is not None
    return ROWS * min(floor_s * 1e6 / 0.6, 3.0)


PLANTED = {
    "anomaly-mode": (backward(checks=8), step_us(backward(checks=8)) - step_us(backward(checks=0))),
    "repeated-line": (
        looped(rounds=ROWS, us=3.0),
        step_us(looped(rounds=ROWS, us=3.0)) - step_us(looped(rounds=1, us=batched_us())),  # the slices go, too
    ),
    "worker-restart": (loading(restarts=5), 500.0),
    "dense-embedding": (
        embedded(indices=1_000),
        step_us(embedded(indices=1_000))
        - step_us(embedded(indices=1_000, gradient_us=100 * 0.1, update_us=500 * 0.001)),
    ),
}
NEAR_MISSES = {
    "anomaly-mode": backward(checks=1),  # a script's own check
    "repeated-line": looped(rounds=ROWS, us=3.0, modules=ROWS),  # the layers of a deep model
    "dense-embedding": embedded(indices=500_000),
    "worker-restart": loading(restarts=0),
}


def test_an_unrolled_cell_is_a_layer_of_the_library() -> None:
    finding = found(REPEATED_LINE, looped(rounds=200, us=5.0, gates=True))
    assert finding is not None
    words = "train.py:8 unrolls a recurrent cell: it runs 200 times a step, on a little each time"
    assert finding.title == words and "nn.LSTM" in finding.fix
    finding = found(REPEATED_LINE, looped(rounds=200, us=5.0))
    assert finding is not None and "torch.vmap" in finding.fix and "LSTM" not in finding.fix


def test_the_backward_pass_of_a_line_goes_with_it() -> None:
    forward, both = (looped(rounds=ROWS, us=3.0, backward=backward) for backward in (False, True))
    alone, together = found(REPEATED_LINE, forward), found(REPEATED_LINE, both)
    assert alone is not None and together is not None
    assert together.evidence[0].startswith("384 kernels") and alone.evidence[0].startswith("256 kernels")
    assert 0.9 < (together.saving_s - alone.saving_s) / (ROWS * 20e-6) < 1  # a launch each


def test_a_cell_of_the_library_and_one_over_several_lines_are_cells() -> None:
    def line(name: str, number: int) -> repeated_line._Line:
        return repeated_line._Line(f"train.py:{number} (f)", 100.0, (name,), frozenset({number}))

    assert line("lstm_cell", 3).recurs and not line("linear", 3).recurs
    (whole,) = repeated_line._whole_cells([line("linear", 3), line("tanh", 4)])
    assert whole.recurs and whole.ops == {3, 4}
    assert len(repeated_line._whole_cells([line("linear", 3), line("mul", 4)])) == 2


def test_rounds_that_need_each_other_are_not_batched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(REPEATED_LINE, looped(rounds=ROWS, us=3.0, sliced=False)) is None
    monkeypatch.chdir(tmp_path)
    for body, batches in (("y = f(x[t])", True), ("y = f(x[t], y)", False)):
        (tmp_path / "train.py").write_text("\n" * 6 + f"for t in range(99):\n    {body}\n")
        assert (found(REPEATED_LINE, looped(rounds=ROWS, us=3.0)) is not None) == batches


def test_a_line_that_runs_seldom_is_none() -> None:
    assert found(REPEATED_LINE, looped(rounds=40, us=3.0)) is None


def test_a_lazy_update_is_not_called_the_same() -> None:
    finding = found(DENSE_EMBEDDING, embedded(indices=1_000))
    assert finding is not None and "trains a little differently" in finding.fix
    assert (
        finding.title == "The optimizer goes over all 1.00 M rows of an embedding of which a step uses 1.00 k at most"
    )


def test_anomaly_mode_is_named() -> None:
    finding = found(ANOMALY_MODE, backward(checks=8))
    assert finding is not None and finding.title == "Anomaly mode is on: autograd checks 8 gradients a step for NaN"


def test_a_few_calls_that_were_interrupted_are_no_slow_kernel() -> None:
    def calls(slow: int, **meta: Any) -> Trace:
        machine = Machine()
        for _ in range(4):
            with machine.step():
                for number in range(10):
                    machine.work("aten::mm", (1_000, 1_000), (1_000, 1_000), us=20_000.0 if number < slow else 100.0)
        return machine.trace(**meta)

    assert found(SLOW_KERNEL, calls(2)) is None
    finding = found(SLOW_KERNEL, calls(9))
    assert finding is not None and finding.title.startswith("aten::mm reaches ")
    assert found(SLOW_KERNEL, calls(9, load=8.0, cores=2)) is None  # others had the cores
