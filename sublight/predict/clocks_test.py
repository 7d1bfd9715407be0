"""The clock of long steps is the one that was measured, and counts where it was."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from sublight.predict import clocks, config, estimate, expected, machine
from sublight.predict.step import Step

RUN = Path(__file__).parents[2] / "benchmarks" / "h200.json"


def test_the_share_is_that_of_the_run() -> None:
    rows = [row for row in json.loads(RUN.read_text(encoding="utf-8"))["rows"] if row.get("clock_mhz")]
    capped = [
        row["clock_mhz"] for row in rows if row["bound"] == "matmul_bf16" and "power cap" in (row.get("note") or "")
    ]
    assert len(capped) == 9
    highest = max(row["clock_mhz"] for row in rows)
    assert clocks.SUSTAINED["Hopper"] == statistics.median(capped) / highest


@pytest.mark.parametrize(("gpu", "longer"), [("h200", 1980 / 1740), ("a100", 1.0)])
def test_compute_bound_ops_of_training_take_longer_and_nothing_else_does(gpu: str, longer: float) -> None:
    here, model = machine.find(gpu), config.load("llama-3.2-1b")
    for mode in ("prefill", "train"):
        for op in estimate.predict(model, here, Step(mode=mode, batch=4, context=2048)).ops:  # type: ignore[arg-type]
            burst = expected.timed(op.operation, here)
            is_long = (
                mode == "train"
                and op.operation.kind in ("product", "attention")
                and burst.bound not in ("memory", "launch")
            )
            assert op.timed.expected_s == pytest.approx(burst.expected_s * (longer if is_long else 1.0))


@pytest.mark.parametrize("knob", ["bandwidth", "flops"])
def test_a_little_more_of_a_gpu_is_a_little_faster(knob: str) -> None:
    """A Mixtral's experts lie where memory and products take as long: the one side took 13 % longer than the other."""
    here, model, step = machine.find("h100"), config.load("mixtral-8x7b"), Step(mode="train", batch=1, context=1024)
    before = estimate.predict(model, here, step)
    after = estimate.predict(model, machine.change(here, {knob: 1.01}), step)
    for old, new in zip(before.ops, after.ops, strict=True):
        assert old.expected_s / 1.02 <= new.expected_s <= old.expected_s * 1.0001
