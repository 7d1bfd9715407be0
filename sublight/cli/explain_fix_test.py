"""`sublight explain --fix` as its user meets it: asked before the first run, harmless, and with a diff that applies."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sublight.cli import explain_script
from sublight.cli import main as cli
from sublight.cli.explain_test import Say, files, here, say  # noqa: F401
from sublight.diagnose import explain as diagnose
from sublight.diagnose import fakes as machine
from sublight.diagnose.record import Explanation, Finding
from sublight.fix import cure
from sublight.fix.cure.graphed import GRAPH
from sublight.fix.cure.optimizer import OPTIMIZER
from sublight.fix.cure.record import Edit, Outcome
from sublight.fix.cure.run import Rerun
from sublight.results import write_json

pytest.importorskip("torch")
UNFUSED = """\
import sys
import torch
net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(8)])
x = torch.randn(8, 16)
optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
for step in range(40):
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({"step": step}, "checkpoint.pt")
open("runs.txt", "a").write("finished\\n")
sys.exit(3)
"""


def with_findings(*ids: str) -> Callable[..., Explanation]:
    """Explains as ever, and finds just these: what a machine finds in so small a script depends on its speed."""
    explain = diagnose.explain

    def explain_with(*traces: Any, **options: Any) -> Explanation:
        seen = explain(*traces, **options)
        findings = tuple(
            Finding(id=name, title=name, saving_s=seen.step_s / 3, evidence=(), fix="fused=True") for name in ids
        )
        return dataclasses.replace(seen, findings=findings, verdict=ids[0])

    return explain_with


@pytest.fixture
def script(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(cure, "CURES", (OPTIMIZER, GRAPH))
    monkeypatch.setattr(diagnose, "explain", with_findings("unfused-optimizer", "launch-bound"))
    (here / "train.py").write_text(UNFUSED)
    write_json(machine.limits("cpu").to_json(), here / "limits.json")
    return here / "train.py"


def test_cures_are_tried_and_the_folder_is_what_the_finished_run_left(say: Say, here: Path, script: Path) -> None:  # noqa: F811
    import torch

    status, out, err = say("--limits", "limits.json", "--json", "found.json", "--fix", "--yes", "train.py")
    assert status == 3 and script.read_text() == UNFUSED
    assert torch.load("checkpoint.pt") == {"step": 39}, "a run that was ended in its middle has not replaced it"
    assert (here / "runs.txt").read_text() == "finished\n", "one run to the end, here"
    assert files(here) == {
        *("train.py", "limits.json", "found.json"),
        *("checkpoint.pt", "runs.txt", "explain-train.html"),
    }
    assert "running it again: fused optimizer" in err and "Traceback" not in err and "go on?" not in err
    assert "Tried on the script" in out and "fused=True" in out
    found = json.loads((here / "found.json").read_bytes())
    (tried,) = [each for each in found["fix"]["tried"] if each["names"] == ["fused optimizer"]]
    assert tried["difference"] < 1e-4 and tried["verdict"] in ("saves", "no change", "slower")
    saved = {finding["id"]: finding["real_saving_s"] for finding in found["findings"]}
    assert saved["unfused-optimizer"] == pytest.approx(tried["real_s"])
    assert saved.get("launch-bound") is None, "a graph is for a GPU"


# ------------------------------------------------------------------------------------------------ asked first


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_nothing_runs(say: Say, here: Path, script: Path) -> None:  # noqa: F811
    status, out, err = say("--limits", "limits.json", "--fix", "train.py")
    (line,) = err.splitlines()
    assert (status, out) == (2, "") and "there is no terminal to ask at: add --yes; nothing was run" in line
    assert "up to 7 times" in line, "here, as it is twice, one cure for a CPU, all together, the diff twice"
    assert files(here) == {"train.py", "limits.json"}


@pytest.mark.parametrize(
    ("answer", "runs"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_before_the_first_run_it_says_what_happens_and_asks(
    say: Say,  # noqa: F811
    here: Path,  # noqa: F811
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    runs: bool,
) -> None:
    class Begun(Exception):
        pass

    def begin(*args: Any) -> None:
        raise Begun

    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(explain_script, "_run", begin)
    words = ("--limits", "limits.json", "--fix", "--limit", "10min", "train.py")
    if runs:
        with pytest.raises(Begun):
            say(*words)
        return
    status, out, err = say(*words)
    assert (status, out) == (2, "") and err.endswith("--fix was not agreed to: nothing was run\n")
    for part in ("once, then up to 6 times more", "scratch copy of this folder", "refused", "10 min at most"):
        assert part in err
    assert files(here) == {"train.py", "limits.json"}


def test_the_help_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.run(["explain", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("in scratch copies of this folder", "asks, before the first", "--yes", "--limit", "--write"):
        assert words in shown


# ------------------------------------------------------------------------------------------------ the diff


def test_the_diff_applies_as_it_is_printed_and_as_it_is_written(
    say: Say,  # noqa: F811
    here: Path,  # noqa: F811
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At any width: lines that are longer than the terminal, and tabs."""
    git = shutil.which("git") or pytest.skip("git is not installed")
    long = "if step:\n\tpass  # " + "a long line " * 20 + "\n"
    script.write_text(UNFUSED.replace("for step", "step = 0\n" + long + "for step").replace("range(40)", "range(25)"))
    edit = Edit(kind="argument", file=str(script), line=5, text="fused=True", call="AdamW")

    def run(self: Rerun, names: Sequence[str] = (), *, diff: str = "") -> Outcome:
        did = dict.fromkeys(names, "words")
        return Outcome(
            step_s=5e-3 if names or diff else 10e-3, figures=(1.0,), figures_of="losses", did=did, edits=(edit,)
        )

    monkeypatch.setattr(Rerun, "run", run)
    before = script.read_bytes()
    words = ("--limits", "limits.json", "--write", "fix.patch", "--fix", "--yes", "train.py")
    monkeypatch.setenv("COLUMNS", "30")
    status, out, err = say(*words)
    assert status == 3 and "sublight: diff: fix.patch" in err and script.read_bytes() == before
    text = (here / "fix.patch").read_text()
    assert text.endswith("\n") and out.endswith(text), "whole, as it is, at the end of what is printed"
    subprocess.run([git, "apply", "fix.patch"], cwd=here, check=True)
    assert "foreach=False, fused=True)" in script.read_text()


def test_a_diff_that_could_not_be_written_is_a_status(
    say: Say,  # noqa: F811
    here: Path,  # noqa: F811
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script.write_text(UNFUSED.replace("sys.exit(3)\n", ""))
    edit = Edit(kind="argument", file=str(script), line=5, text="fused=True", call="AdamW")
    (here / "gone").mkdir()

    def run(self: Rerun, names: Sequence[str] = (), *, diff: str = "") -> Outcome:
        if (here / "gone").is_dir():  # and a file stands where the folder was
            (here / "gone").rmdir()
            (here / "gone").touch()
        did = dict.fromkeys(names, "words")
        return Outcome(
            step_s=5e-3 if did or diff else 10e-3, figures=(1.0,), figures_of="losses", did=did, edits=(edit,)
        )

    monkeypatch.setattr(Rerun, "run", run)
    status, out, err = say("--limits", "limits.json", "--write", "gone/fix.patch", "--fix", "--yes", "train.py")
    assert status == 2 and "gone/fix.patch" in err and "fused=True" in out, "the report is there, the file is not"
