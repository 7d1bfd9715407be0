"""The docs' page of the ladders is generated, and says what was measured and what was not."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from sublight.extensions import LADDERS
from sublight.report import fakes, ladders
from sublight.results import Result, Run, read_run, write_json

ROOT = Path(__file__).parents[2]


def measured() -> Run:
    """A made-up run of one ladder."""
    import dataclasses

    case = {"op": "transpose", "direction": "fwd", "shape": {"rows": 8, "cols": 8}, "dtype": "float32"}
    rows = [
        Result(**case, provider="torch", median_s=2e-4, floor_s=1e-4, bound="memory"),
        Result(**case, provider="naive", ours=True, median_s=4e-4, floor_s=1e-4, bound="memory", error=0.0),
        Result(**case, provider="padded", ours=True, median_s=1.25e-4, floor_s=1e-4, bound="memory", error=3.0),
        Result(**case, provider="swizzled", ours=True, floor_s=1e-4, unavailable="DriverError: launch"),
    ]
    return dataclasses.replace(fakes.run(), rows=tuple(rows))


def test_without_a_run_nothing_is_claimed() -> None:
    text = ladders.page(None)
    assert text.count("Not yet measured.") == len(LADDERS) + 1
    assert "%" not in text
    for ladder in LADDERS:
        for rung in ladder.rungs:
            assert rung.change.split(":")[0][:40].split("_")[0] in text.replace("\\", ""), rung.name


def test_a_run_fills_the_page() -> None:
    run = measured()
    text = ladders.page(run)
    assert text.count("Not yet measured.") == len(LADDERS) - 1
    assert "| 8x8 fp32 | PyTorch | 200 µs | 50 % |  |  |" in text
    assert "|  | naive | 400 µs | 25 % | 0.50 |  |" in text
    assert "WRONG: 3.0× error" in text and "DriverError: launch" in text
    picture = ladders.picture(run)
    ElementTree.fromstring(picture)
    assert "naive" in picture and "padded" not in picture, "what is wrong has no bar"


def test_the_page_of_the_docs_is_what_is_generated() -> None:
    found = ROOT / "benchmarks" / "cuda_ladders_h200.json"
    run = read_run(found) if found.exists() else None
    assert (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8") == ladders.page(run), "make docs writes it anew"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(measured().to_json(), tmp_path / "run.json")
    assert ladders.main([str(tmp_path), str(tmp_path / "run.json")]) == 0
    assert (tmp_path / "cuda.md").exists() and (tmp_path / ladders.PICTURE).exists()
    assert ladders.main([]) == 2
    (tmp_path / "broken.json").write_text("{")
    assert ladders.main([str(tmp_path), str(tmp_path / "broken.json")]) == 2
    assert "broken.json" in capsys.readouterr().err
