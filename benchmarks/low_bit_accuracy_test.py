"""The script that says what few bits cost gives a figure for each way, and 8 bits cost next to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "low_bit_accuracy.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}  # interpreted, it would take an hour


def test_each_way_has_a_figure(tmp_path: Path) -> None:
    text = str(SCRIPT)  # its own source
    words = [text, "--seconds", "3", "--width", "128", "--layers", "1", "--device", "cpu"]
    command = [sys.executable, str(SCRIPT), *words, "--json", str(tmp_path / "rows")]
    ran = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=240)
    assert ran.returncode == 0, ran.stderr
    whole, *rows = json.loads((tmp_path / "rows").read_text(encoding="utf-8"))["rows"]
    rises = {(row["how"], row["group"]): row["rise"] for row in rows}
    assert whole["how"] == "as it is" and len(rises) == 7
    assert abs(rises["w8a16", 128]) <= 0.01 and abs(rises["w2a16", 32]) > abs(rises["w8a16", 128])
