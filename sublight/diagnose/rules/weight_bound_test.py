"""The shares are those of the run on an H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sublight.diagnose.rules.weight_bound import LARGE, MEASURED, SMALL

RUN = json.loads((Path(__file__).parents[3] / "benchmarks" / "products_h200.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("rows", MEASURED)
def test_the_shares_are_the_measured_ones(rows: int) -> None:
    for weights, share in zip((SMALL, LARGE), MEASURED[rows], strict=True):
        tried = [row for row in RUN["low-bit"] if (row["m"], row["n"] * row["k"], row["bits"]) == (rows, weights, 4)]
        best = min(tried, key=lambda row: row["time_s"])
        assert share == pytest.approx(best["time_s"] / best["torch_s"], abs=0.01)
