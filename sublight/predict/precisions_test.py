"""The accuracy that predictions show is the one that was measured."""

from __future__ import annotations

import json
from pathlib import Path

from sublight.predict import precisions

RUN = Path(__file__).parents[2] / "benchmarks" / "low_bit_accuracy_h200.json"


def test_the_package_holds_the_run_of_the_benchmarks() -> None:
    """Else: cp benchmarks/low_bit_accuracy_h200.json sublight/predict/low_bit_accuracy.json"""
    assert precisions.measured() == json.loads(RUN.read_text(encoding="utf-8"))


def test_a_precision_takes_the_rows_of_its_own_scales() -> None:
    rows = precisions.measured()["rows"]
    rises = sorted(row["rise"] for row in rows if row["how"] == "w4a16" and row["group"] == 128)
    found = precisions.rise("bfloat16", "int4")
    assert found and [found.least, found.most] == [rises[0], rises[-1]] and len(rises) == 2
    assert precisions.rise("float16", "int4") == found and precisions.rise("float32", "int4") is None
    assert all(precisions.rise(*choice) for choice in precisions.CHOICES if choice[0] in ("int8", "float8_e4m3fn"))
