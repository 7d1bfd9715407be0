"""--calibrate on a GPU that is made up: what it measures is what predictions then say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sublight import cost, gpus
from sublight.errors import BadInput
from sublight.predict import analytic, calibrate, expected, machine, rows
from sublight.predict.operation import Operation
from sublight.results import Limit, Limits

SHAPE = {"m": 512, "n": 2048, "k": 4096}
SLOWER = 2.0


def test_a_slower_gpu_is_predicted_as_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    h200 = machine.find("h200")

    def measured(kind: str, shape: dict[str, int], device: str) -> dict[str, Any]:
        seconds = SLOWER * expected.timed(operation(shape), h200).expected_s
        bytes_ = operation(shape).cost.bytes
        return {
            "op": "matmul",
            "direction": "fwd",
            "shape": shape,
            "median_s": seconds,
            "bytes": bytes_,
            "buffer_sets": 9,
        }

    reached = Limits(device="H200", kind="cuda", limits=(Limit(name="hbm_copy", unit="B/s", value=4e12),))
    monkeypatch.setattr(calibrate, "detect", lambda: gpus.find("h200"))
    monkeypatch.setattr(calibrate.limits_run, "run", lambda **options: reached)
    monkeypatch.setattr(rows, "COUNTS", {"product": 24, "decode attention": 1})
    monkeypatch.setattr(rows, "cases", lambda seed, streams: [("product", drawn(seed)) for seed in range(24)])
    monkeypatch.setattr(rows, "measured", measured)
    monkeypatch.setattr(analytic, "TILES", analytic.TILES[4:9:2])  # a shorter test
    found = calibrate.run("mine")
    assert found.missing == ("decode attention",) and found.rows == 24 and found.checks[0]["rows"] == 12
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(found.to_json()))
    here = machine.find(str(path))
    assert here.limits.value("hbm_copy") == 4e12
    timed = expected.timed(operation(SHAPE), here)
    assert timed.expected_s == pytest.approx(SLOWER * expected.timed(operation(SHAPE), h200).expected_s, rel=0.25)
    assert timed.how == "measured"


def drawn(seed: int) -> dict[str, int]:
    return {"m": 64 << seed % 4, "n": 1024 << seed % 3, "k": 1024 << seed // 12}


def operation(shape: dict[str, int]) -> Operation:
    spent = cost.find("matmul")(shape, "bfloat16", "fwd")
    return Operation(name="x", op="matmul", kind="product", shape=shape, dtype="bfloat16", count=1, cost=spent)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "detect", lambda: None)
    with pytest.raises(BadInput, match="--calibrate measures a GPU, and torch has none here"):
        calibrate.run("mine")
