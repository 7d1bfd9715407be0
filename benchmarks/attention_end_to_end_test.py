"""The scripts for the GPU: the docs show the table of the rows that are kept, and shapes for `predict` are enough."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).parent


def loaded(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def test_the_docs_show_the_rows_that_are_kept() -> None:
    rows = json.loads((HERE / "attention_end_to_end_h200.json").read_text(encoding="utf-8"))["rows"]
    lines = loaded("attention_end_to_end").table(rows)
    assert len(lines) == 2 + len(rows)
    assert "\n".join(lines) in (HERE.parent / "docs" / "attention.md").read_text(encoding="utf-8")


def test_a_step_is_held_against_the_networks_first_row() -> None:
    row: dict[str, Any] = {"network": "A", "attention": "written out", "forward_s": 3.0, "backward_s": 5.0}
    row |= {"attention_forward_s": 1.0, "attention_backward_s": 3.0, "peak_bytes": 2e9, "batch_that_fits": 7}
    row |= {"loss": [9.0, 1.23456], "batch": 8, "length": 16}
    other = {**row, "attention": "torch", "forward_s": 1.0, "backward_s": 1.0}
    *_, first, second = loaded("attention_end_to_end").table([row, other])
    assert "| 50 % | 1.00 x |" in first and "| 1.2346 |" in first and "| 4.00 x |" in second


def test_enough_shapes_of_both_kinds_are_drawn_and_no_order_tells_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    script = loaded("attention_rows")
    drawn = script.shapes(0)
    kinds = [kind for kind, _ in drawn]
    assert len(drawn) >= 200 and len({str(shape) for _, shape in drawn}) == len(drawn)
    assert 30 < kinds[:120].count(script.KINDS[0]) < 90 and drawn == script.shapes(0) != script.shapes(1)
    lengths = sorted(shape["kv_len"] for _, shape in drawn)
    assert lengths[0] < 64 and lengths[-1] > 16384


def test_a_run_that_ended_early_goes_on_where_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    script, file, seen = loaded("attention_rows"), tmp_path / "rows.json", []

    def measured(kind: str, shape: dict[str, int], device: str, *, peers: bool) -> list[dict[str, Any]]:
        seen.append(shape)
        return [{"op": kind, "provider": "flash", "shape": shape, "median_s": 1.0, "bytes": 1, "flops": 1}]

    clock = iter([0.0, 1.0, 2.0, 300.0, *([400.0] * 9)])  # two shapes, then the limit; then time enough
    monkeypatch.setattr(script, "measured", measured)
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys, "argv", ["attention_rows.py", "--tiny", "--json", str(file)])
    script.main()
    assert "stopped at the limit: 2 of 4 shapes" in capsys.readouterr().out and len(seen) == 2
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--more", str(file)])
    script.main()
    assert seen == [shape for _, shape in script.shapes(0, tiny=True)]
    assert [row["shape"] for row in json.loads(file.read_text())["rows"]] == seen
