"""The script that says what few bits cost gives a figure for each way, and 8 bits cost next to nothing."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "low_bit_accuracy.py"


@pytest.mark.usefixtures("one_thread")
def test_each_way_has_a_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["--seconds", "3", "--width", "128", "--layers", "1", "--device", "cpu", "--json", str(tmp_path / "rows")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(SCRIPT), *words])  # its own source is the text
    runpy.run_path(str(SCRIPT), run_name="__main__")
    whole, *rows = json.loads((tmp_path / "rows").read_text(encoding="utf-8"))["rows"]
    rises = {(row["how"], row["group"]): row["rise"] for row in rows}
    assert whole["how"] == "as it is" and len(rises) == 7
    assert abs(rises["w8a16", 128]) <= 0.01 and abs(rises["w2a16", 32]) > abs(rises["w8a16", 128])
