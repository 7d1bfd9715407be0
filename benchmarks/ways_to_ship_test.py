"""The table has a line for every way, and one that does not build says why and fails the run."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).with_name("ways_to_ship.py")


@pytest.fixture
def ways() -> ModuleType:
    return importlib.import_module("benchmarks.ways_to_ship")


def figures(start_s: float) -> str:
    times = {"start_s": start_s, "call_s": 2e-6, "bare_call_s": 1.5e-6, "torch_call_s": 1e-6}
    return "a line of its own\n" + json.dumps(times | {"device": "CPU", "torch": "2.13"}) + "\n"


def test_every_way_has_a_row(ways: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    started: dict[str, int] = {}

    def run(project: Any, folder: Path, *command: str) -> str:
        if project.way == "cmake":
            raise ways.BadInput("cmake: no rule")
        if command[1] != "-c":
            return ""
        started[project.name] = started.get(project.name, 0) + 1
        return figures(5.0 if started[project.name] == 1 else 0.5)

    monkeypatch.setattr(ways, "_run", run)
    monkeypatch.setattr(ways.toolchain, "troubles", lambda tools: [])
    monkeypatch.setattr(sys, "argv", ["ways_to_ship.py", "--like", "add2", "--json", str(tmp_path / "out.json")])
    assert ways.main() == 1
    shown = capsys.readouterr().out
    assert "| add2 | inline | 4.5 | 0.50 | 2.0 | 1.5 | 1.0 |" in shown
    assert "| add2 | cmake | failed: cmake: no rule |" in shown
    kept = json.loads((tmp_path / "out.json").read_text())
    assert [row["way"] for row in kept["rows"]] == [way.name for way in ways.WAYS]
    assert {row["way"] for row in kept["rows"] if row["problem"]} == {"cmake"}


def test_a_missing_tool_is_no_failure(ways: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    missing = ways.toolchain.Trouble(problem="no ninja on the PATH", fix="pip install ninja")
    monkeypatch.setattr(ways.toolchain, "troubles", lambda tools: [missing])
    monkeypatch.setattr(sys, "argv", ["ways_to_ship.py", "--like", "add2", "--ways", "inline,load"])
    assert ways.main() == 0
    assert "| add2 | load | left out: no ninja on the PATH: pip install ninja |" in capsys.readouterr().out


def test_bad_words_are_one_line(ways: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["ways_to_ship.py", "--ways", "wheel"])
    assert ways.main() == 2
    assert "unknown way 'wheel'" in capsys.readouterr().err


def test_the_complaint_is_the_compilers(ways: ModuleType) -> None:
    report = (
        "a.cpp:3: error: no such file\nninja: build stopped: subcommand failed.\nmake: *** [Makefile:6: build] Error 1"
    )
    assert ways.complaint(report) == "a.cpp:3: error: no such file"
    assert ways.complaint("make: *** [build] Error 1") == "make: *** [build] Error 1"
    assert ways.complaint("") == "failed without a word"


def test_a_crash_is_named_with_its_place(ways: ModuleType, tmp_path: Path) -> None:
    project = ways.Project(name="x", way="load", start="add2", folder=tmp_path, files={})
    script = "print('begun')\nimport os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
    with pytest.raises(
        ways.BadInput, match=r"ended by SIGSEGV after 'begun', in File \"<string>\", line 3 in <module>"
    ):
        ways._run(project, tmp_path, sys.executable, "-c", script)
