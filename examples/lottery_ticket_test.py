"""The example runs, prints, writes its plot, and its ticket wins; bad arguments are refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parent


@pytest.fixture
def example(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("lottery_ticket", FOLDER / "lottery_ticket.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_ticket_wins(example: Any) -> None:
    """At an eighth of the weights, in few steps: the order of the three ways is the whole point."""
    task = example.mlp_task()
    object.__setattr__(task, "share", 0.65)
    object.__setattr__(task, "steps", 120)
    found = example.lottery(task, seeds=1, rounds=3)
    ticket, reinitialised, random = ([*by_left.values()][-1][0] for by_left in found.values())
    assert ticket > reinitialised + 0.02 and ticket > random + 0.05
    assert all(scores[1.0][0] > 0.5 for scores in found.values())


def test_it_prints_and_draws(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for task, name in (("gpt", "gpt.html"), ("mlp", "mlp.svg")):
        made = getattr(example, f"{task}_task")()
        object.__setattr__(made, "steps", 4)
        monkeypatch.setattr(example, f"{task}_task", lambda made=made: made)
        file = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["x", "--task", task, "--seeds", "2", "--rounds", "2", "--plot", str(file)])
        example.main()
        out = capsys.readouterr().out
        assert "winning ticket" in out and "two of four, fine-tuned" in out and " s of one core" in out
        drawing = file.read_text()
        assert drawing.count("<polyline") == 3 and "weights left" in drawing
    monkeypatch.setattr(sys, "argv", ["x", "--task", "mlp", "--seeds", "1", "--rounds", "1", "--json"])
    example.main()
    scores = json.loads(capsys.readouterr().out)
    assert list(scores["scores"]) == [made.name] and list(scores["two_of_four"]) == [made.name]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seeds", "0"], "at least 1"),
        (["--plot", "a.svg"], "ends in .html"),
        (["--task", "mlp", "--plot", "a.gif"], "must end in"),
        (["--task", "cnn"], "invalid choice"),
    ],
)
def test_bad_arguments(
    example: Any, args: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *args])
    with pytest.raises(SystemExit) as error:
        example.main()
    assert error.value.code == 2 and words in capsys.readouterr().err
