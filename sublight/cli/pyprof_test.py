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
# by its own clock: a fixed number of rounds is over before the first look on a fast machine
LOOP = (
    "import time\nend = time.thread_time() + 0.3\nwhile time.thread_time() < end: sum(i * i for i in range(30_000))\n"
)
ENDS = {
    "status": ("sys.exit(3)", 3, ""),
    "words": ("sys.exit('no luck')", 1, "no luck"),
    "error": ("raise ValueError('boom')", 1, "ValueError: boom"),
    "_exit": ("os._exit(7)", 7, "the program ends by os._exit"),
    "exec": ("os.execvp('true', ['true'])", 0, "by exec: the profile ends here"),
    "fork": ("os.fork() or sys.exit(0)\nos.wait()", 0, ""),
    "closed": ("sys.stdout.close()", 0, ""),
    "shallow": ("sys.setrecursionlimit(60)", 0, ""),
    "no clock": ("time.perf_counter = lambda: 1.0", 0, ""),
    "interrupt": ("import signal; os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass", 130, ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_program_stays_as_it_is(tmp_path: Path, end: str) -> None:
    code, status, line = ENDS[end]
    program = "number = 5\n" + OWN.format(path=str(PACKAGE)) + LOOP + code
    mode = "--trace" if end in ("error", "fork") else "--sample"
    ran = pyprof(tmp_path, program, mode, "--json", "out.json", words=("a", "--b"), told="told")
    assert ran.returncode == status, ran.stderr
    assert ran.stdout.startswith("['program.py', 'a', '--b'] __main__ program.py told 5\n")
    assert line in ran.stderr and "Functions, by own time" in ran.stdout and ran.stdout.count("Functions,") == 1
    assert (tmp_path / "pyprof-program.html").exists()
    assert "sublight/" not in ran.stderr, "frames of ours are not in the traceback"
    assert 0.3 < read(str(tmp_path / "out.json")).wall_s < LONGEST_S
    names = {one.frame.function for one in found_in(tmp_path).functions}
    assert "<genexpr>" in names and not any("Looks" in name for name in names)


def test_a_program_that_breaks_what_a_report_needs_keeps_its_status(tmp_path: Path) -> None:
    ran = pyprof(tmp_path, "import json, sys\njson.dumps = None\nsys.exit(5)\n")
    assert ran.returncode == 5 and "no report: TypeError" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("option", ["--html", "--collapsed"])
def test_a_file_that_could_not_be_written_is_a_status(tmp_path: Path, option: str) -> None:
    ran = pyprof(tmp_path, LOOP, option, "/dev/full")
    assert ran.returncode == 2 and "cannot write /dev/full: No space left on device" in ran.stderr
    assert "Functions, by own time" in ran.stdout


LATE = """\
import threading, time
def late():
    time.sleep(0.2)
    inner()
def inner(): pass
threading.Thread(target=late).start()
"""


@pytest.mark.parametrize("end", ["raise SystemExit(4)", "raise ValueError", "def f(:"])
def test_threads_are_waited_for_however_the_script_ends(tmp_path: Path, end: str) -> None:
    ran = pyprof(tmp_path, LATE + end, "--trace", "--json", "out.json")
    assert ran.returncode == (4 if "4" in end else 1) and "sublight/" not in ran.stderr, ran.stderr
    calls = {one.frame.function: one.calls for one in found_in(tmp_path).functions}
    assert calls.get("inner", 0) == (0 if "def" in end else 1)


def test_a_module_brings_its_packages(tmp_path: Path) -> None:
    """Python imports them first: that is the program's work, and not done before the profile begins."""
    package = tmp_path / "deep" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "deep" / "__init__.py").write_text("import sys\ndef first(): pass\nfirst()\nprint(len(sys.argv))\n")
    (package / "__init__.py").write_text("def second(): pass\nsecond()\n")
    (package / "work.py").write_text("def third(): pass\nthird()\nthird()\n")
    command = [
        sys.executable,
        "-m",
        "sublight",
        "pyprof",
        "--trace",
        "--json",
        "out.json",
        "-m",
        "deep.inner.work",
        "7",
    ]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    assert ran.stdout.startswith("2\n"), ran.stderr
    calls = {one.frame.function: one.calls for one in found_in(tmp_path).functions}
    assert [calls.get(name) for name in ("first", "second", "third")] == [1, 1, 2]
    assert "runpy" not in {Path(one.frame.file).stem for one in found_in(tmp_path).functions}
    (tmp_path / "deep" / "__init__.py").write_text("import not_there\n")
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    assert ran.returncode == 1 and "No module named 'not_there'" in ran.stderr


FORKS = """\
import os
def child():
    for number in range(20):
        os.fork() or os._exit(0)
        os.wait()
for number in range(20):
    if not os.fork():
        child()
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("mode", ["--sample", "--trace"])
def test_no_thread_of_ours_stands_beside_a_fork(tmp_path: Path, mode: str) -> None:
    """Python 3.12 and later warn of threads."""
    ran = pyprof(tmp_path, FORKS, mode, "--json", "out.json")
    assert ran.returncode == 0 and "Warning" not in ran.stderr, ran.stderr
    assert len(read(str(tmp_path / "out.json")).processes) == 421
    assert {Path(one.frame.file).name for one in found_in(tmp_path).functions} <= {"program.py", ""}


def test_a_child_of_an_old_python_is_named(tmp_path: Path) -> None:
    program = """\
import os, subprocess, sys
old = "import sys; sys.version_info = (2, 7); import runpy; runpy.run_path(%r)" % (sys.argv[1],)
os.putenv("X", "1")
subprocess.run([sys.executable, "-S", "-c", old], check=True)
"""
    site = PACKAGE / "sublight" / "pyprof" / "child" / "sitecustomize.py"
    ran = pyprof(tmp_path, program, "--json", "out.json", words=(str(site),))
    assert "1 of its processes ended without a word (killed, or an old Python)" in ran.stdout, (ran.stdout, ran.stderr)


CHILDREN = """\
import multiprocessing, subprocess, sys
def job(n):
    total = 0
    for i in range(n): total += i
    return total
def meet(others):
    others.wait()  # else one worker may do all while the other starts, and is ended before it can say a word
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    with context.Pool(2, meet, (context.Barrier(2),)) as pool:
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
        (("--native", "missing.py"), "no such script: missing.py"),
        (("-",), "- is not a regular file: save the script to one first"),
        (("pipe",), "pipe is not a regular file"),
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
        (("good.json", "--trace"), "shown as it was taken: leave --trace out"),
        (("good.json", "--native"), "shown as it was taken: leave --native out"),
        (("own.py", "--html", "-"), "--html - is not printed"),
        (("good.json", "--collapsed", "-"), "--collapsed - is not printed"),
        (("good.json", "--json", "good.json"), "named twice"),
        (("own.py", "--html", "own.py"), "named twice"),
        (("-m", "own", "--json", "own.py"), "named twice"),
        (("--gpu", "own.py", "--json", "own.py"), "named twice"),
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
    (tmp_path / "own.py").write_text("x = 1\n")
    os.mkfifo(tmp_path / "pipe")
    assert run(*words) == 2
    result = capsys.readouterr().err
    assert line in result and result.count("\n") == 1
    assert (tmp_path / "own.py").read_text() == "x = 1\n", "a script is not written over"


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
        {"name": 'process 11:"python y.py"'},
    ]
    profiles = [
        {"name": 'Process 9 Thread 0x1 "MainThread"', "samples": [[0, 1], [0, 1, 2], [0]], "weights": [0.01] * 3},
        {"name": 'Thread 11 ""', "samples": [[3, 1]], "weights": [0.01]},
    ]
    first, *others = pyspy.processes({"shared": {"frames": frames}, "profiles": profiles}, 9, "python x.py")
    assert others == [] and first.samples is not None
    assert first.samples.threads == ("MainThread", "thread 11") and len(first.samples.rows) == 3
    assert first.looks == 2, "of the thread that was seen most often"
    stacks = [[frame.function for frame in first.samples.stack(row)] for row in first.samples.rows]
    assert stacks == [["main"], ["main", "memcpy"], ["main"]]


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
