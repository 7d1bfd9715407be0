"""The script that checks and times the ladders on a GPU works: here with kernels that the CPU plays."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.errors import BadInput
from sublight.extensions import build
from sublight.extensions.reduce import REDUCE
from sublight.extensions.transpose import TRANSPOSE
from sublight.limits.run import this_machine
from sublight.report import fakes


@pytest.fixture(scope="module")
def script() -> Any:
    try:
        build.host_compiler()
    except BadInput as error:
        pytest.skip(str(error))
    return importlib.import_module("benchmarks.cuda_ladders")


def test_a_row_for_pytorch_and_for_each_step_that_takes_the_shape(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.timed_steps, "TIME_LIMIT_S", 0.001)
    ladder = replace(TRANSPOSE, shapes={"float32": ({"rows": 33, "cols": 32},)})
    rows = list(script.ladder_rows(ladder, this_machine("cpu"), fakes.limits()))
    assert [row.provider for row in rows] == ["torch", "naive", "conflicts", "padded", "swizzled"]
    assert all(row.median_s and row.floor_s and row.bytes == 8 * 33 * 32 for row in rows)
    assert [row.error for row in rows] == [None, 0.0, 0.0, 0.0, 0.0]
    assert not any(map(script.is_wrong, (row for row in rows if not row.fraction or row.fraction < 1)))


def test_a_wrong_step_and_a_failing_one_are_named(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(runner: Any, x: Any) -> Any:
        return x.t().contiguous() + 1

    def fails(runner: Any, x: Any) -> Any:
        raise RuntimeError("launch: CUDA_ERROR\nmore")

    monkeypatch.setattr(script.timed_steps, "TIME_LIMIT_S", 0.001)
    naive = TRANSPOSE.rung("naive")
    broken = (replace(naive, launch=off_by_one), replace(naive, name="fails", launch=fails))
    shapes = ({"rows": 33, "cols": 32},)
    ladder = replace(TRANSPOSE, rungs=broken, shapes={"float32": shapes}, test_shapes=shapes)
    wrong = script.checked([ladder], "cpu")
    assert len(wrong) == 2 and "times PyTorch's error" in wrong[0] and "RuntimeError: launch: CUDA_ERROR" in wrong[1]
    _, first, second = script.ladder_rows(ladder, this_machine("cpu"), fakes.limits())
    assert script.is_wrong(first) and script.is_wrong(second)
    assert second.unavailable == "RuntimeError: launch: CUDA_ERROR"


def test_a_single_number_is_judged_at_a_size_whose_truth_can_be_had(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.timed_steps, "LARGEST_EXACT", 300)
    rung = REDUCE.rung("cooperative")
    assert script.timed_steps.error_at(REDUCE, rung, {"numel": 2**40}, "float64", "cpu") <= 2


def test_bad_words_are_one_line(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cuda_ladders.py", "--only", "transpos", "--check"])
    assert script.main() == 2
    assert capsys.readouterr().err == "cuda_ladders: unknown ladder 'transpos': did you mean transpose?\n"
