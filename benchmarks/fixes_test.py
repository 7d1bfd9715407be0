"""The scripts run, the cases are those that a cure treats, and the table says what the reports hold."""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fixes

torch = pytest.importorskip("torch")
FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", sorted(path.stem for path in (FOLDER / "fix_scripts").glob("*.py")))
def test_a_new_script_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    precision = torch.get_float32_matmul_precision()
    monkeypatch.setattr(sys, "argv", [name, "--steps", "2", "--device", "cpu"])
    try:
        runpy.run_path(str(FOLDER / "fix_scripts" / f"{name}.py"), run_name="__main__")
    finally:
        torch.set_float32_matmul_precision(precision)
    assert "nan" not in capsys.readouterr().out


def test_ten_examples_and_five_new_scripts() -> None:
    cases = fixes.cases().values()
    assert [sum(case.kind == kind for case in cases) for kind in ("example", "new", "seen")] == [10, 5, 1]
    assert all(case.path.exists() for case in cases)


def tried(name: str, predicted_s: float, real_s: float | None, verdict: str) -> dict[str, Any]:
    return {
        **{"names": [name], "findings": ["x"], "predicted_s": predicted_s, "real_s": real_s, "verdict": verdict},
        **{"spread_s": 0.0, "difference": 0.0, "words": "why"},
    }


def report(*trials: dict[str, Any], checked: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"step_s": 12e-3, "fix": {"before_s": 10e-3, "tried": list(trials), "checked": checked, "notes": []}}


def test_the_table() -> None:
    known = {
        name: fixes.Case(path=Path(f"{name}.py"), kind="new" if name == "new" else "example")
        for name in ("good", "bad", "lost", "new")
    }
    rows = [
        *fixes.rows_of(
            "good",
            report(
                tried("small", 1e-3, 0.1e-3, "saves"), tried("main", 5e-3, 4.2e-3, "saves"),
                checked=tried("main", 5e-3, 4.0e-3, "saves"),
            ),
        ),
        *fixes.rows_of("bad", report(tried("main", 6e-3, 4e-3, "saves"))),
        *fixes.rows_of("new", report(tried("main", 6e-3, None, "failed"), tried("second", 2e-3, -1e-3, "slower"))),
    ]  # fmt: skip
    lines = fixes.table(rows, {"lost": "not done after 900 s"}, known).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["good", "bad", "lost", "new"]
    assert lines[1].split() == [
        "good",
        "main",
        "10.00",
        "ms",
        "5.00",
        "ms",
        "4.20",
        "ms",
        "1.19",
        "4.00",
        "ms",
        "saves",
    ]
    assert "1.50  –" in lines[2] and "not done" in lines[3] and lines[4].endswith("slower")
    assert lines[5] == "examples: 1 of 2 that ran within 25%; 3 in all"
    assert lines[6] == "new scripts: 0 of 1 that ran within 25%; 1 in all"


def test_a_call_that_is_cut_short_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes, "_commit", lambda: "abc")
    store = fixes.Store(tmp_path)
    cut = report(tried("main", 6e-3, None, "not measured"))
    cut["fix"]["notes"].append("interrupted: a diff is shown only when it has been run")
    for name, made in (("good", report(tried("main", 6e-3, 5e-3, "saves"))), ("cut", cut), ("none", report())):
        (tmp_path / f"{name}.json").write_text(json.dumps({**made, "device": "a GPU"}))
        store.keep(name, "")
    store.keep("late", fixes.NOT_IN_TIME)
    store.keep("broken", "exit status 1")
    again = fixes.Store(tmp_path)
    assert again.done == {"good", "none", "broken"} and [row["example"] for row in again.data["rows"]] == ["good"]
    assert again.keep("cut", "") == fixes.NOT_IN_TIME


def test_a_script_that_outlasts_its_time_is_asked_then_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes, "GRACE_S", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-S", "-c", deaf], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    assert fixes._wait(process, time.monotonic()) == fixes.NOT_IN_TIME
    assert process.returncode == -signal.SIGKILL
