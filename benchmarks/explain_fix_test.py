"""The table of docs/explain.md has what `explain --fix` gave on an H200, the miss included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sublight import units

HERE = Path(__file__).parent
RUN = json.loads((HERE / "explain_fix_h200.json").read_text())
DOCS = (HERE.parent / "docs" / "explain.md").read_text(encoding="utf-8")
WITHIN = 0.25


def main_rows() -> list[dict[str, Any]]:
    """Of each example, the cure of its largest finding that ran."""
    rows: dict[str, dict[str, Any]] = {}
    for row in RUN["rows"]:
        best = rows.get(row["example"])
        if row["real_s"] is not None and (best is None or row["predicted_s"] > best["predicted_s"]):
            rows[row["example"]] = row
    return list(rows.values())


@pytest.mark.parametrize("row", main_rows(), ids=lambda row: row["example"])
def test_the_docs_have_the_row(row: dict[str, Any]) -> None:
    line = next(
        line
        for line in DOCS.splitlines()
        if line.startswith(f"| `{row['example']}`") and f"| `{row['cures'][0]}` |" in line
    )
    ratio = row["predicted_s"] / row["real_s"]
    assert line.count(f"{ratio:.2f}") == 1, (line, ratio)
    assert f"| {units.text(row['predicted_s'], 's')} | {units.text(row['real_s'], 's')} " in line


def test_how_many_are_within_the_bound() -> None:
    examples = [row for row in main_rows() if (HERE.parent / "examples" / f"{row['example']}.py").exists()]
    right = [row for row in examples if abs(row["predicted_s"] / row["real_s"] - 1) <= WITHIN]
    assert (len(right), len(examples)) == (8, 9) and "Eight of the nine examples are within 25 %" in DOCS
