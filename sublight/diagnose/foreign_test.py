"""Traces that nobody here wrote: every one gets an explanation whose figures agree, and a report of it.

Runs over the folder that SUBLIGHT_TRACES names. Beside NAME.json.gz may lie NAME.golden_timeline.csv, the times that
another tool read off the same trace.
"""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from sublight.diagnose.consistency import contradictions
from sublight.diagnose.explain import explain
from sublight.report.explain import page, terminal
from sublight.trace.load import ENDINGS, load

FOLDER = os.environ.get("SUBLIGHT_TRACES", "")
FILES = sorted(path for path in Path(FOLDER).iterdir() if path.name.endswith(ENDINGS)) if FOLDER else []
GOLDEN = [path for path in FILES if path.with_name(f"{path.name.partition('.')[0]}.golden_timeline.csv").exists()]


@pytest.mark.skipif(not FOLDER, reason="SUBLIGHT_TRACES names no folder of traces")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_foreign_trace_is_explained_without_contradiction(path: Path) -> None:
    found = explain(load(path), source=path.name)
    assert contradictions(found) == []
    Console(file=io.StringIO(), width=100).print(terminal.page(found))
    assert len(page.document(found).encode()) < page.MOST_BYTES


@pytest.mark.skipif(not GOLDEN, reason="no trace with golden times beside it")
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_the_recorded_steps_take_what_another_tool_says(path: Path) -> None:
    lines = path.with_name(f"{path.name.partition('.')[0]}.golden_timeline.csv").read_text().splitlines()
    golden = {row["type"]: float(row["time ms"]) for row in csv.DictReader(lines) if row.get("is_recompute") != "True"}
    found = explain(load(path))
    assert found.traced_step_s * found.steps * 1e3 == pytest.approx(golden["total_time"], rel=0.01)
