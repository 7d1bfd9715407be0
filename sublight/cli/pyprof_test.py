"""`sublight pyprof` in real processes: the program stays as it is without us, and its children are followed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sublight
from sublight.cli import main
from sublight.pyprof import pyspy
from sublight.pyprof.fakes import sampled, traced
from sublight.pyprof.record import read
from sublight.pyprof.tables import Tables, tables

PACKAGE = Path(sublight.__file__).parents[1]
LONGEST_S = 120.0


def pyprof(folder: Path, program: str, *options: str, words: tuple[str, ...] = (), told: str = "") -> Any:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "sublight", "pyprof", *options, "program.py", *(("--", *words) if words else ())]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "COLUMNS": "80"}
    return subprocess.run(
        command, cwd=folder, env=environment, input=told, capture_output=True, text=True, timeout=LONGEST_S
    )


def found_in(folder: Path) -> Tables:
    return tables(read(str(folder / "out.json")))


OWN = """\
import sys, os
assert os.environ.get("PYTHONPATH") == {path!r}, "the environment stays as it was"
print(sys.argv, __name__, os.path.basename(__file__), sys.stdin.read(), sys.modules["__main__"].number, flush=True)
"""
ENDS = {
    "status": ("sys.exit(3)", 3, ""),
    "words": ("sys.exit('no luck')", 1, "no luck"),
    "error": ("raise ValueError('boom')", 1, "ValueError: boom"),
    "_exit": ("os._exit(7)", 7, "the program ends by os._exit"),
    "exec": ("os.execvp('true', ['true'])", 0, "by exec: the profile ends here"),
    "fork": ("os.fork() or sys.exit(0)\nos.wait()", 0, ""),
    "interrupt": ("import signal; os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass", 130, ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_program_stays_as_it_is(tmp_path: Path, end: str) -> None:
    code, status, line = ENDS[end]
    program = "number = 5\n" + OWN.format(path=str(PACKAGE)) + "sum(i * i for i in range(300_000))\n" + code
    mode = "--trace" if end in ("error", "fork") else "--sample"
    ran = pyprof(tmp_path, program, mode, "--json", "out.json", words=("a", "--b"), told="told")
    assert ran.returncode == status, ran.stderr
    assert ran.stdout.startswith("['program.py', 'a', '--b'] __main__ program.py told 5\n")
    assert line in ran.stderr and "Functions, by own time" in ran.stdout and ran.stdout.count("Functions,") == 1
    assert (tmp_path / "pyprof-program.html").exists()
    assert "sublight/" not in ran.stderr, "frames of ours are not in the traceback"
    names = {one.frame.function for one in found_in(tmp_path).functions}
    assert "<genexpr>" in names and not any("Looks" in name for name in names)


CHILDREN = """\
import multiprocessing, subprocess, sys
def job(n):
    total = 0
    for i in range(n): total += i
    return total
if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        print(sum(pool.map(job, [1_500_000] * 2)))
    program = "import os\\nassert 'SUBLIGHT_PYPROF' not in os.environ\\nsum(range(9))"
    subprocess.run([sys.executable, "-c", program], check=True)
"""


@pytest.mark.parametrize("mode", ["--sample", "--trace"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_are_followed(tmp_path: Path, method: str, mode: str) -> None:
    """A pool's workers are ended by SIGTERM: what they saw is there all the same."""
    ran = pyprof(tmp_path, CHILDREN.format(method=method), mode, "--json", "out.json")
    assert ran.returncode == 0 and str(2 * sum(range(1_500_000))) in ran.stdout, ran.stderr
    profile = read(str(tmp_path / "out.json"))
    assert len(profile.processes) == 4, (profile.notes, ran.stderr)
    job = next(one for one in found_in(tmp_path).functions if one.frame.function == "job")
    assert all(name.split()[0].isdigit() for name in job.threads), "of the children, not of the program"
    if mode == "--trace":
        assert job.calls == 2


def test_a_childs_sigterm_stays_what_it_was(tmp_path: Path) -> None:
    """Terminated as by default, even where it never gives the interpreter's lock back in time."""
    program = """\
import multiprocessing, os, signal
def stuck(ready):
    ready.set()
    while True: pass
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=stuck, args=(ready,))
    child.start(); ready.wait(); child.terminate(); child.join()
    print(child.exitcode, signal.getsignal(signal.SIGTERM))
"""
    ran = pyprof(tmp_path, program, "--json", "out.json")
    assert ran.stdout.startswith(f"{-signal.SIGTERM} ") and len(read(str(tmp_path / "out.json")).processes) == 2


def run(*words: str) -> int:
    return main.run(["pyprof", *words])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "what shall be profiled"),
        (("missing.py",), "no such script: missing.py"),
        (("-m", "no_such_module"), "no module named no_such_module"),
        (("missing.json",), "no such file: missing.json"),
        (("bad.json",), "it is not JSON"),
        (("list.json",), "this is no profile"),
        (("--sample", "--trace", "x.py"), "exclude each other"),
        (("--trace", "--pid", "1"), "go with --sample"),
        (("--gpu", "--counts", "x.py"), "leave out --counts, or --gpu"),
        (("--diff", "good.json"), "compares two profiles"),
        (("--diff", "good.json", "calls.json"), "do not compare"),
        (("--diff", "--trace", "good.json", "good.json"), "leave the other options out"),
        (("good.json", "calls.json"), "one profile at a time"),
        (("good.json", "--json", "good.json"), "named twice"),
        (("good.json", "--html", "."), "it is a folder"),
        (("good.json", "--rate", "0"), "--rate"),
        (("good.json", "--lr", "3"), "go after --"),
        (("--gpu", "good.json", "--html", "x.html"), "--gpu prints a table"),
        (("--pid", "1", "x.py"), "leave the script out"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "good.json").write_text(json.dumps(sampled().to_json()))
    (tmp_path / "calls.json").write_text(json.dumps(traced().to_json()))
    assert run(*words) == 2
    told = capsys.readouterr().err
    assert line in told and told.count("\n") == 1


def test_without_py_spy_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pyspy.shutil, "which", lambda name: None)
    monkeypatch.setattr(pyspy.sys, "executable", "/nowhere/python")
    assert run("--pid", str(os.getpid())) == 2
    assert capsys.readouterr().err == f"sublight: {pyspy.MISSING}\n"


def test_what_py_spy_writes_is_read() -> None:
    frames = [
        {"name": "thread (9)"},
        {"name": "main", "file": "x.py", "line": 3},
        {"name": "memcpy", "file": "libc.so"},
    ]
    profiles = [
        {"name": 'Process 9 Thread 0x1 "MainThread"', "samples": [[0, 1], [0, 1, 2], [0]], "weights": [0.01] * 3},
        {"name": 'Thread 11 ""', "samples": [[1]], "weights": [0.01]},
    ]
    first, *others = pyspy.processes({"shared": {"frames": frames}, "profiles": profiles}, 9, "python x.py")
    assert others == [] and first.samples is not None
    assert first.samples.threads == ("MainThread", "thread 11") and len(first.samples.rows) == 3
    assert [frame.function for frame in first.samples.stack(first.samples.rows[1])] == ["main", "memcpy"]


def test_a_profile_is_shown_again_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(json.dumps(sampled().to_json()))
    Path("b.json").write_text(json.dumps(sampled(slower=2.0).to_json()))
    assert run("a.json", "--speedscope", "s.json", "--chrome", "c.json.gz", "--collapsed", "x.txt") == 0
    assert "hot" in capsys.readouterr().out
    assert sorted(os.listdir()) == ["a.json", "b.json", "c.json.gz", "s.json", "x.txt"]
    assert run("--diff", "a.json", "b.json", "--json", "-") == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert changes[0]["function"] == "hot" and changes[0]["after_s"] == pytest.approx(2 * changes[0]["before_s"])
    assert run("--diff", "a.json", "b.json") == 0 and Path("pyprof-diff-b.html").exists()
