"""`sublight demo` where there is no GPU, and what it says to wrong words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sublight.cli import demo, main
from sublight.extensions.demos import DEMOS, run
from sublight.extensions.demos.demo import Figures, Record


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (demo, run):
        monkeypatch.setattr(module, "why_no_gpu", lambda: "no driver")


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["demo"]) == 0
    assert all(each.name in capsys.readouterr().out for each in DEMOS[:1])
    assert main.run(["demo", "--json", "-"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["demos"]] == [each.name for each in DEMOS]


def test_one_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    assert main.run(["demo", "overlap", "--html", str(page), "--json", str(data)]) == 0
    assert "No GPU here: no driver" in capsys.readouterr().out
    assert json.loads(data.read_text())["no_gpu"] == "no driver" and "No GPU here" in page.read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["overlapp"], "unknown demo 'overlapp': did you mean overlap?"),
        (["--all"], "no GPU to run on: no driver"),
        (["blocks", "--all"], "--all runs every demo: leave out 'blocks', or --all"),
        (["blocks", "--json", "/"], "cannot write /: it is a folder"),
        (["blocks", "--json", "same.html", "--html", "same.html"], "is named twice"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["demo", *words]) == 2
    assert line in capsys.readouterr().err


def test_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each demonstration's figures are in the record, with what it ran on."""
    made = {each.name: Figures(missing=("tried",)) for each in DEMOS}
    monkeypatch.setattr(run, "run_all", lambda progress: made)
    monkeypatch.setattr(
        run, "record", lambda figures, commit: Record(gpu="G", driver="1", date="d", commit=commit, figures=figures)
    )
    assert main.run(["demo", "--all", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["gpu"] == "G" and set(data["figures"]) == {each.name for each in DEMOS}
