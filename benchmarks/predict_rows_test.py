"""The rows that a GPU run gives are what the fit reads and what the check compares."""

from __future__ import annotations

import importlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sublight.predict import analytic, config, expected, fit, machine, memory_ops, rows

HERE = Path(__file__).parent


def loaded(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


script = loaded("predict_rows")


def faked(kind: str, shape: dict[str, Any], factor: float) -> dict[str, Any]:
    """A row whose time is the predicted one times a factor."""
    spent = rows.cost_of(kind, shape)
    op, direction, sizes = rows.op_of(kind, shape)
    row = {"op": op, "direction": direction, "shape": sizes, "dtype": "bfloat16", "buffer_sets": 1000}
    row |= {"bytes": spent.bytes, "flops": spent.total_flops}
    cold = analytic.cold_share(1000 * spent.bytes, machine.find("h200").gpu.l2_bytes or 1)
    return row | {"median_s": expected.timed(script.operation(row), machine.find("h200"), cold).expected_s * factor}


FEW = {"product": 60, "prefill attention": 40, "decode attention": 40, "memory-bound op": 44}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "COUNTS", FEW)  # shorter tests


def test_a_check_has_300_products_and_100_of_each_attention() -> None:
    assert rows.COUNTS["product"] >= 300
    assert min(rows.COUNTS[kind] for kind in ("prefill attention", "decode attention")) >= 100


@pytest.mark.usefixtures("few")
def test_as_many_shapes_as_a_table_needs_and_others_by_another_seed() -> None:
    first, second = list(rows.cases(0, only=FEW)), list(rows.cases(1, only=FEW))
    assert dict(Counter(kind for kind, _ in first)) == FEW
    assert first[:30] == list(itertools.islice(rows.cases(0, only=FEW), 30))
    keys = [{(kind, *shape.values()) for kind, shape in drawn} for drawn in (first, second)]
    assert len(keys[0] & keys[1]) < 8  # tiny ones may meet, and images, of which there are whole numbers


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_errors_are_those_that_were_put_in(factor: float) -> None:
    made = [faked(kind, shape, factor) for kind, shape in rows.cases(0, only=FEW)]
    found = {row["what"]: row for row in script.errors(made, machine.find("h200"))}
    assert set(found) == {*script.BARS, script.SMALL}
    assert all(row["predicted"][0] == pytest.approx(1 - 1 / factor, abs=1e-9) for row in found.values())
    assert "decode attention" in script.table(list(found.values()))


@pytest.mark.usefixtures("few")
def test_the_fit_reads_the_rows() -> None:
    made = [faked(kind, shape, 1.0) for kind, shape in rows.cases(0, only=FEW)]
    counts = {kind: len(each) for kind, each in fit.rows_of_run(machine.find("h200"), made).items()}
    assert counts == {"product": 60, "prefill attention": 40, "decode attention": 40}


def test_memory_bound_ops_are_those_of_known_models_each_as_often_as_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "COUNTS", {"memory-bound op": 4 * len(memory_ops.OPS)})
    drawn = [shape for _, shape in rows.cases(0, only=rows.COUNTS)]
    counts = Counter((shape["op"], shape["direction"]) for shape in drawn)
    assert set(counts) == {(each.op, each.direction) for each in memory_ops.OPS} and set(counts.values()) == {4}
    moved = [rows.cost_of("memory-bound op", shape).bytes for shape in drawn]
    assert sum(each < 4 << 20 for each in moved) > 4 and sum(each > 1 << 23 for each in moved) > len(drawn) / 2
    widths = {shape["cols"] for shape in drawn if shape["op"] == "add_rms_norm"}
    assert widths <= {config.load(name).hidden for name in config.known_names()}


def test_small_cases_run_here() -> None:
    pytest.importorskip("torch")
    every = [case for case in rows.cases(0, tiny=True) if case[0] != "prefill attention"]
    for kind, shape in (every[0], every[-1]):
        row = rows.measured(kind, shape, "cpu")
        assert row["median_s"] > 0 and row["flops"] > 0
        assert (row["op"], row["direction"], row["shape"]) == rows.op_of(kind, shape)


def test_memory_bound_ops_of_a_run_after_the_tables_were_frozen_hold_the_bar() -> None:
    measured = json.loads((HERE / "predict_check_memory_h200.json").read_text(encoding="utf-8"))["rows"]
    found = {each["what"]: each for each in script.errors(measured, machine.find("h200"))}
    bound = found["memory-bound op"]
    median, most = bound["predicted"]
    assert bound["rows"] >= 130 and median <= 0.04 and most <= 0.10
    assert len({(row["op"], row["direction"]) for row in measured}) == len(memory_ops.OPS)
    pairs = (bound["predicted"], bound["roofline"])
    shown, roofline = (" · ".join(f"{100 * error:.0f} %" for error in pair) for pair in pairs)
    page = " ".join((HERE.parent / "docs" / "predict.md").read_text(encoding="utf-8").split())
    assert f"{bound['rows']} ops that memory bounds: {shown} (pure roofline {roofline})" in page
