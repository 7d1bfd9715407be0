"""--budget: a CI that fails when a step got slower, and says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sublight.cli import budget
from sublight.cli.explain_test import Say, here, say, write  # noqa: F401
from sublight.errors import BadInput

WORDS = ("--gpu", "h200", "small.json")


@pytest.fixture
def step_s(say: Say, here: Path) -> float:  # noqa: F811
    """Of a small trace, whose report is base.json."""
    write(here / "small.json")
    write(here / "slow.json", slower=30.0)
    assert say("--json", "base.json", *WORDS)[0] == 0
    found: float = json.loads((here / "base.json").read_bytes())["step_s"]
    return found


def test_a_time(say: Say, step_s: float) -> None:  # noqa: F811
    status, _, err = say("--budget", f"{step_s * 1e6 * 1.01:.3f}us", *WORDS)
    assert status == 0 and "sublight: within budget: a step takes" in err
    status, out, err = say("--budget", f"{step_s * 1e6 / 1.5:.3f}us", *WORDS)
    assert status == 1 and out
    (line,) = [line for line in err.splitlines() if "budget" in line]
    assert line.startswith("sublight: over budget: a step takes ") and ", 50 % more than the " in line


@pytest.mark.parametrize(
    "words",
    [
        ("--budget", "1.1x", "base.json", "slow.json"),
        ("slow.json", "--budget", "1.1x", "base.json"),
        ("--budget", "1.1x base.json", "slow.json"),
    ],
)
def test_a_factor_of_an_earlier_report(say: Say, here: Path, step_s: float, words: tuple[str, ...]) -> None:  # noqa: F811
    status, _, err = say(*words, "--gpu", "h200", "--json", "now.json")
    (line,) = [line for line in err.splitlines() if "budget" in line]
    assert status == 1 and "(1.1 x " in line and '" grew from ' in line, line
    found = json.loads((here / "now.json").read_bytes())
    assert found["budget"]["within"] is False and found["budget"]["step_s"] == pytest.approx(1.1 * step_s)
    assert found["budget"]["reason"] in line
    assert say("--budget", "1.1x", "base.json", *WORDS)[0] == 0


def test_another_machine_is_no_base(say: Say, here: Path, step_s: float) -> None:  # noqa: F811
    base = json.loads((here / "base.json").read_bytes())
    (here / "base.json").write_text(json.dumps({**base, "device": "NVIDIA T4"}))
    status, _, err = say("--budget", "100x", "base.json", *WORDS)
    assert status == 1 and "base.json is of NVIDIA T4" in err


def test_no_report_keeps_no_budget() -> None:
    assert budget.Budget(step_s=1.0).check(None)[0] == budget.OVER


@pytest.mark.parametrize(
    "text", ["50", "ms", "0ms", "-3ms", "fast", "1.1x", "0x base.json", "1.1x gone.json", "1.1x list"]
)
def test_what_is_no_budget(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list").write_text("[]")
    with pytest.raises(BadInput) as error:
        budget.parse(text, ["train.py"])
    assert "\n" not in str(error.value)


def test_a_base_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInput, match=r"cannot read gone.json: No such file"):
        budget.parse("1.1x", ["gone.json", "train.py"])


def test_a_failing_script_keeps_its_own_status(say: Say, here: Path) -> None:  # noqa: F811
    pytest.importorskip("torch")
    (here / "train.py").write_text("import sys\nsys.exit(7)\n")
    assert say("--gpu", "h200", "--budget", "1ms", "train.py")[0] == 7
    (here / "train.py").write_text("pass\n")
    assert say("--gpu", "h200", "--budget", "1ms", "train.py")[0] == 1
