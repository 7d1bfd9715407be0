"""`sublight explain` as its user meets it: reports and files for what can be explained, one line for what cannot."""

from __future__ import annotations

import copy
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sublight import nvml
from sublight.cli import explain_output
from sublight.cli import main as cli
from sublight.diagnose import fakes as machine
from sublight.diagnose.record import BREAKDOWN
from sublight.errors import BadInput
from sublight.results import write_json
from sublight.trace.read import chrome_fakes

Say = Callable[..., tuple[int, str, str]]
TRAIN = """\
import sys
import torch
net, x = torch.nn.Linear(64, 64), torch.randn(32, 64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(30):
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained with", *sys.argv[1:])
sys.exit(3)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on a machine without a GPU that was never measured."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvml, "health", lambda: None)
    return folder


@pytest.fixture
def say(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run `sublight explain` with these words: its status, stdout and stderr."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        status = cli.run(["explain", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def write(path: Path, *, rank: int = 0, slower: float = 1.0) -> None:
    """A small trace; `slower`: how much longer its kernels take."""
    trace: Any = copy.deepcopy(chrome_fakes.trace())
    trace["distributedInfo"]["rank"] = rank
    del trace["sublight"]
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            event["dur"] *= slower
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------------ traces


@pytest.mark.parametrize("name", ["small.json", "small.json.gz", "small.pt.trace.json"])
def test_a_trace(say: Say, here: Path, name: str) -> None:
    write(here / name)
    status, out, err = say(name)
    assert status == 0
    assert "NVIDIA H200" in out and "host-sync" in out
    assert err.splitlines() == ["sublight: report: explain-small.html"]
    assert files(here) == {name, "explain-small.html"}
    assert (here / "explain-small.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_alone(say: Say, here: Path) -> None:
    write(here / "small.json")
    status, out, err = say("small.json", "--json", "-")
    assert (status, err) == (0, "")
    data = json.loads(out)
    assert files(here) == {"small.json"}, "no page was asked for"
    asked = {"device", "limits_from", "steps", "step_s", "op_floor_s", "floor_s", "verdict", "combined_saving_s", "ops"}
    assert asked <= set(data)
    assert sum(data["breakdown"].values()) == pytest.approx(data["step_s"], rel=1e-9)
    assert set(data["breakdown"]) == set(BREAKDOWN)
    assert all({"id", "saving_s", "title", "evidence", "fix"} <= set(finding) for finding in data["findings"])
    assert data["source"] == "small.json" and data["steps"] == 3


def test_files_that_are_asked_for(say: Say, here: Path) -> None:
    write(here / "small.json")
    words = ("--json", "out/found.json", "--html", "out/page.html", "--perfetto", "out/all.json.gz")
    status, out, err = say("small.json", *words)
    assert status == 0 and "NVIDIA H200" in out and "out/page.html" in err
    assert files(here / "out") == {"found.json", "page.html", "all.json.gz"} and files(here) == {"small.json", "out"}
    assert json.loads((here / "out/found.json").read_bytes())["verdict"]
    events = json.loads(gzip.decompress((here / "out/all.json.gz").read_bytes()))["traceEvents"]
    assert {"sublight findings"} <= {event.get("args", {}).get("name") for event in events}


def test_json_alone_with_a_page_that_is_asked_for(say: Say, here: Path) -> None:
    write(here / "small.json")
    status, out, err = say("small.json", "--json", "-", "--html", "page.html")
    assert status == 0 and json.loads(out) and err == ""
    assert files(here) == {"small.json", "page.html"}


def test_a_folder_of_ranks(say: Say, here: Path) -> None:
    for rank in range(3):
        write(here / "ranks" / f"rank{rank}.json.gz", rank=rank, slower=1 + 2 * (rank == 0))
    (here / "ranks" / "notes.json").write_text("not a trace")
    status, out, _ = say("ranks", "--json", "-")
    data = json.loads(out)
    assert status == 0
    assert any(note.startswith("3 ranks were read") for note in data["notes"])
    assert "rank-imbalance" in {finding["id"] for finding in data["findings"]}
    assert say("ranks")[0] == 0 and "explain-ranks.html" in files(here)


def test_floors_of_another_gpu_or_of_a_file(say: Say, here: Path) -> None:
    write(here / "small.json")
    write_json(machine.limits().to_json(), here / "limits.json")

    def limits_from(*words: str) -> str:
        return str(json.loads(say("small.json", "--json", "-", *words)[1])["limits_from"])

    assert "H200" in limits_from()
    assert "A100" in limits_from("--gpu", "a100")
    assert "limits.json" in limits_from("--limits", "limits.json")


def test_a_damaged_trace_is_explained_in_part(say: Say, here: Path) -> None:
    text = chrome_fakes.text()
    (here / "cut.json").write_bytes(text[: len(text) * 2 // 3])
    status, out, _ = say("cut.json", "--json", "-")
    data = json.loads(out)
    assert status == 0 and data["notes"] and data["step_s"] > 0


# ------------------------------------------------------------------------------------------------ two traces


def test_what_changed(say: Say, here: Path) -> None:
    write(here / "before.json", slower=4.0)
    write(here / "after.json")
    status, out, err = say("--diff", "before.json", "after.json")
    assert status == 0 and err == ""
    assert "faster" in out and "aten::addmm" in out
    assert files(here) == {"before.json", "after.json"}
    status, out, _ = say("--diff", "before.json", "after.json", "--json", "-")
    data = json.loads(out)
    assert (status, data["before"], data["after"]) == (0, "before.json", "after.json")
    assert any(op["name"] == "aten::addmm" and op["verdict"] == "faster" for op in data["ops"])


# ------------------------------------------------------------------------------------------------ scripts


def test_a_script_that_goes_elsewhere_leaves_its_report_here(say: Say, here: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (here / "train.py").write_text(f"import os\n{TRAIN.replace('sys.exit(3)', '')}os.chdir({str(tmp_path)!r})\n")
    write_json(machine.limits("cpu").to_json(), here / "limits.json")
    status, _, err = say("--limits", "limits.json", "--json", "found.json", "train.py")
    assert status == 0 and "report: explain-train.html" in err
    assert files(here) == {"train.py", "limits.json", "found.json", "explain-train.html"}


@pytest.mark.parametrize(
    "words", [("--html", "small.json"), ("--json", "same", "--html", "same"), ("--perfetto", "./small.json")]
)
def test_no_output_replaces_another_or_what_is_read(say: Say, here: Path, words: tuple[str, ...]) -> None:
    write(here / "small.json")
    before = (here / "small.json").read_bytes()
    status, out, err = say("small.json", *words)
    assert status == 2 and out == "" and "is named twice" in err
    assert files(here) == {"small.json"} and (here / "small.json").read_bytes() == before


def test_a_file_that_holds_no_limits_stays_where_it_is(say: Say, here: Path) -> None:
    write(here / "small.json")
    (here / "mine.json").write_text('{"a": 1}')
    status, _, err = say("small.json", "--limits", "mine.json")
    assert status == 2 and "is not a file of limits" in err
    assert files(here) == {"small.json", "mine.json"}


def test_arguments_without_dashes_before_them_get_a_hint(say: Say, here: Path) -> None:
    (here / "train.py").write_text(TRAIN)
    status, _, err = say("train.py", "--lr", "3")
    assert status == 2 and "go after --" in err


def test_json_alone_goes_to_stdout_and_the_scripts_own_words_to_stderr(say: Say, here: Path) -> None:
    pytest.importorskip("torch")
    (here / "train.py").write_text(TRAIN)
    write_json(machine.limits("cpu").to_json(), here / "limits.json")
    status, out, err = say("--limits", "limits.json", "--json", "-", "train.py")
    assert status == 3 and json.loads(out)["kind"] == "cpu"
    assert "trained with" in err
    assert files(here) == {"train.py", "limits.json"}


def test_a_script_keeps_its_output_and_its_exit_code(say: Say, here: Path) -> None:
    pytest.importorskip("torch")
    (here / "train.py").write_text(TRAIN)
    write_json(machine.limits("cpu").to_json(), here / "limits.json")
    words = ("--limits", "limits.json", "--trace", "kept.json.gz", "--steps", "3", "--json", "found.json")
    status, out, err = say(*words, "train.py", "--", "--lr", "3")
    assert status == 3
    assert "trained with --lr 3" in out
    assert "sublight: report: explain-train.html" in err
    assert files(here) == {"train.py", "limits.json", "kept.json.gz", "found.json", "explain-train.html"}
    found = json.loads((here / "found.json").read_bytes())
    assert found["source"] == "python train.py --lr 3"
    assert (found["kind"], found["steps_from"]) == ("cpu", "optimizer steps")
    assert found["steps"] in (2, 3)  # a slow first one is warm-up
    assert {"aten::addmm", "aten::mm"} & {op["name"] for op in found["ops"]}

    status, out, _ = say("kept.json.gz", "--limits", "limits.json", "--json", "-")  # what was kept says the same
    again = json.loads(out)
    assert status == 0
    assert (again["verdict"], again["step_s"]) == (found["verdict"], pytest.approx(found["step_s"]))


@pytest.mark.parametrize("end", ["", "sys.stdout.close()", "sys.__stdout__.close()"])
def test_the_report_goes_to_stdout_whatever_the_script_has_put_there(here: Path, end: str) -> None:
    pytest.importorskip("torch")
    lines = TRAIN.splitlines()
    text = "\n".join(["import atexit, sys", "sys.stdout = open('log.txt', 'w')", *lines[1:-1], end])
    if not end:
        text += "\natexit.register(lambda: print('at its exit'))"
    (here / "train.py").write_text(text)
    write_json(machine.limits("cpu").to_json(), here / "limits.json")
    words = [sys.executable, "-m", "sublight", "explain", "--limits", "limits.json", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "\nstep " in done.stdout and "report: explain-train.html" in done.stderr
    assert (here / "log.txt").read_text().split() == ["trained", "with", *([] if end else ["at", "its", "exit"])]


# ------------------------------------------------------------------------------------------------ one line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a script or a trace"),
        (("gone.json",), "there is no file gone.json"),
        (("gone.py",), "gone.py"),
        (("-m", "no_such_module"), "no_such_module"),
        (("words.json",), "words.json"),
        (("empty.json",), "empty.json"),
        (("list.json",), "list.json"),
        (("noise.json.gz",), "noise.json.gz"),
        (("noise.sqlite",), "noise.sqlite"),
        (("small.json", "small.json"), "one trace at a time"),
        (("nothing",), "holds no trace"),
        (("broken",), "no trace of broken can be read"),
        (("--diff", "small.json"), "--diff takes two traces"),
        (("--diff", "small.json", "small.json", "small.json"), "--diff takes two traces"),
        (("--diff", "small.json", "gone.json"), "there is no file gone.json"),
        (("--diff", "small.json", "small.json", "--html", "x.html"), "--html"),
        (("small.json", "--gpu", "h2000"), "h2000"),
        (("small.json", "--limits", "small.json"), "not a file of limits"),
        (("small.json", "--limits", "gone.json"), "gone.json: No such file"),
        (("small.json", "--trace", "kept.json"), "--trace"),
        (("small.json", "--fix"), "--fix takes a script"),
        (("--diff", "small.json", "small.json", "--fix"), "--fix"),
        (("small.json", "--yes"), "--yes goes with --fix"),
        (("small.json", "--write", "fix.patch"), "--write goes with --fix"),
        (("--fix", "--yes", "--limit", "soon", "train.py"), "'soon' is no time: write 90s, 10min or 1h"),
        (("--fix", "--yes", "--limit", "0s", "train.py"), "--limit"),
        (("--fix", "--yes", "--write", "small.json", "train.py"), "there is such a file"),
        (("--fix", "--yes", "../train.py"), "no such script"),
        (("small.json", "--steps", "0"), "--steps"),
        (("small.json", "--steps", "3"), "--steps is how many steps of a script to profile"),
        (("--diff", "small.json", "small.json", "--steps", "3"), "--steps"),
        (("small.json", "--html", "words.json/page.html"), "words.json/page.html"),
        (("small.json", "--perfetto", "words.json/all.json"), "words.json/all.json"),
    ],
)
def test_what_cannot_be_done_is_one_line(say: Say, here: Path, words: tuple[str, ...], said: str) -> None:
    write(here / "small.json")
    (here / "words.json").write_text("These are words.")
    (here / "empty.json").write_text("")
    (here / "list.json").write_text("[1, 2, 3]")
    (here / "noise.json.gz").write_bytes(b"\x1f\x8bnoise")
    (here / "noise.sqlite").write_bytes(b"SQLite format 3\x00noise")
    (here / "nothing").mkdir()
    (here / "broken").mkdir()
    (here / "broken" / "rank0.json").write_text("These are words.")
    status, out, err = say(*words)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("sublight: ") and said in line
    assert not {name for name in files(here) if name.endswith(".html")}


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("runs/rank0.1699.pt.trace.json.gz", "rank0.1699"),
        ("train.py", "train"),
        ("profile.nsys-rep", "profile"),
        ("a.sqlite", "a"),
        ("runs", "runs"),
        (".json", "report"),
    ],
)
def test_the_page_is_named_after_what_it_explains(name: str, stem: str) -> None:
    assert explain_output.stem(name) == stem


@pytest.mark.parametrize("words", [("--gpu", "h2000"), ("--limits", "train.py"), ("--limits", "gone.json")])
def test_options_are_checked_before_the_script_runs(say: Say, here: Path, words: tuple[str, str]) -> None:
    pytest.importorskip("torch")
    (here / "train.py").write_text("open('ran', 'w').close()\n")
    status, out, err = say(*words, "train.py")
    assert status == 2 and not out and len(err.splitlines()) == 1
    assert files(here) == {"train.py"}


@pytest.mark.parametrize(("option", "status"), [("--html", 2), ("--perfetto", 2), ("--json", 0)])
def test_a_file_that_could_not_be_written_is_a_status(
    say: Say, here: Path, monkeypatch: pytest.MonkeyPatch, option: str, status: int
) -> None:
    """The report comes all the same; a page that nobody asked for costs nothing."""

    def is_full(*_: object) -> None:
        raise BadInput("cannot write file: No space left on device")

    write(here / "small.json")
    monkeypatch.setattr("sublight.report.explain.page.write", is_full)
    monkeypatch.setattr("sublight.report.explain.perfetto.write", is_full)
    got, out, err = say("--gpu", "h200", "small.json", option, "file")
    assert got == status and "sublight: cannot write file: No space left on device" in err
    assert "step" in out
