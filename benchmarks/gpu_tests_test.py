"""Tests in several processes: each runs once, and one that ends its process costs itself only."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_tests
from benchmarks.gpu_tests import Outcome, Run
from benchmarks.gpu_tests_worker import Worker, grouped

SUITE = """
import json, os, time, weakref, pytest

JOB = json.loads(os.environ["SUBLIGHT_GPU_TESTS"])
TENSORS = weakref.WeakSet()
class Tensor: pass

def test_fails_with_a_tensor():
    tensor = Tensor()
    TENSORS.add(tensor)
    error = ValueError("one that refers to the frame that refers to it")
    raise error

def test_tensors_of_a_failed_test_are_gone():
    assert not TENSORS

@pytest.mark.gpu_large
@pytest.mark.parametrize("n", range(3))
def test_large(n):
    with open("large.txt", "a") as file:
        file.write(f"{JOB['share']:.2f} ")

@pytest.mark.parametrize("n", range(20))
def test_passes(n):
    with open("ran.txt", "a") as file:
        file.write(f"{n}\\n")

def test_fails(): assert 1 == 2
def test_ends_its_process(): os._exit(9)
def test_is_left_out(): pytest.skip("needs a dog")
def test_takes_much_memory():
    with open("turns.txt", "a") as file:
        file.write(JOB["turn"] + " ")
    if len(open("turns.txt").read().split()) < 3:
        raise RuntimeError("torch.OutOfMemoryError")

@pytest.mark.gpu_alone
def test_alone(): pass

@pytest.mark.gpu_alone
def test_hangs():
    open("hangs", "w").close()
    time.sleep(1000)
"""


class Clock:
    """Time is up as soon as the last test hangs, however slow the machine is."""

    def __init__(self, hangs: Path) -> None:
        self.hangs = hangs

    def monotonic(self) -> float:
        return 100.0 if self.hangs.exists() else 0.0

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def test_each_test_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "a_test.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  gpu_alone\n  gpu_large\n")
    monkeypatch.setattr(gpu_tests, "time", Clock(tmp_path / "hangs"))
    result = gpu_tests.run(["a_test.py"], processes=2, limit_s=50, whole="")
    outcomes = {each.id.removeprefix("a_test.py::test_"): each.outcome for each in result.outcomes}
    passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
    gone = "tensors_of_a_failed_test_are_gone"
    large = {f"large[{n}]" for n in range(3)}
    assert passed == {*(f"passes[{n}]" for n in range(20)), *large, "alone", "takes_much_memory", gone}
    assert (tmp_path / "large.txt").read_text().split() == ["0.72"] * 3
    assert outcomes["fails_with_a_tensor"] == "failed"
    assert sorted(map(int, (tmp_path / "ran.txt").read_text().split())) == list(range(20))
    assert outcomes["fails"] == outcomes["ends_its_process"] == "failed"
    assert outcomes["is_left_out"] == "skipped"
    assert (tmp_path / "turns.txt").read_text().split() == ["together", "few", "alone"]
    assert result.not_run == ("a_test.py::test_hangs",)


@pytest.mark.parametrize("processes", [1, 2, 3, 7, 14, 40])
def test_shares_together_leave_room(processes: int) -> None:
    each = gpu_tests.shares(processes)
    assert len(each) == processes
    assert processes == 1 or sum(each) == pytest.approx(gpu_tests.OURS)
    jobs = gpu_tests.jobs_of("together", processes, folder="", whole="")
    assert [job.large for job in jobs] == sorted((job.large for job in jobs), reverse=True) and jobs[0].large
    assert all(job.share == max(each) for job in jobs if job.large)
    assert not any(job.share == max(each) for job in jobs if not job.large)


def test_as_many_processes_as_have_memory_and_cores() -> None:
    h200 = 150_110_000_000
    assert gpu_tests.most_processes(14, h200) == 14 and gpu_tests.shares(14)[0] * h200 > 24 * 2**30
    assert gpu_tests.most_processes(4, h200) == 4 and gpu_tests.most_processes(14, 24 * 2**30) == 1
    assert gpu_tests.most_processes(0, h200) == 1


class Item:
    def __init__(self, name: str, **marks: float) -> None:
        self.name, self.nodeid, self.marks = name, name, marks

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(args=(self.marks[name],)) if name in self.marks else None


def test_groups_take_about_as_long() -> None:
    long = [Item(f"long {n}", gpu_seconds=4) for n in range(4)]
    large = [Item(f"large {n}", gpu_seconds=4, gpu_large=1) for n in range(1)]
    short = [Item(f"short {n}") for n in range(7)]
    items: list[Any] = [*long, *large, *short]
    groups = [[item.name[:-2] for item in group] for group in grouped(items)]
    assert groups == [["long"] * 2, ["long"] * 2, ["large"], ["short"] * 6, ["short"]]


def test_what_needs_much_memory_has_a_process_of_its_own(tmp_path: Path) -> None:
    items: list[Any] = [Item("a"), Item("large", gpu_large=1), Item("b"), Item("large too", gpu_large=1)]
    large, small = (
        Worker(job).groups(items) for job in gpu_tests.jobs_of("together", 2, folder=str(tmp_path), whole="")
    )
    assert [item.name for item in next(large)] == ["large"]  # before what the other can take
    assert [item.name for group in small for item in group] == ["a", "b"]
    assert [item.name for group in large for item in group] == ["large too"]


def test_the_table_ends_with_what_failed() -> None:
    passed = Outcome(id="sublight/ops/norm/a_test.py::test_a", outcome="passed", seconds=2.0)
    left_out = Outcome(id="sublight/ops/norm/a_test.py::test_b", outcome="skipped", text="Skipped: needs a dog")
    failed = Outcome(id="sublight/top/b_test.py::test_c", outcome="failed", seconds=1.0, text="E   assert 1 == 2")
    run = Run(outcomes=(failed, passed, left_out), not_run=("c_test.py::test_d",), elapsed_s=61.4, processes=8)
    lines = gpu_tests.table(run).splitlines()
    assert lines[1].split() == ["sublight/ops/norm", "1", "0", "1", "2.0"]
    assert "left out    1: needs a dog" in lines
    assert lines[-5:] == [
        "FAILED sublight/top/b_test.py::test_c",
        "    E   assert 1 == 2",
        "NOT RUN c_test.py::test_d",
        "",
        "1 passed, 1 failed, 1 left out, 1 not run: time was up in 61 s, 8 processes",
    ]
    assert not run.ok


@pytest.mark.parametrize(
    ("outcomes", "ok"),
    [((), False), (("passed", "skipped"), True), (("passed", "failed"), False), (("memory",), False)],
)
def test_a_run_is_good_where_something_ran_and_nothing_failed(outcomes: tuple[str, ...], ok: bool) -> None:
    each = tuple(Outcome(id=str(n), outcome=outcome) for n, outcome in enumerate(outcomes))
    assert Run(outcomes=each, not_run=(), elapsed_s=1.0, processes=1).ok == ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes 0: at least 1"),
        (["--limit", "-1"], "--limit -1: more than 0 seconds"),
        (["no/such_test.py"], "no/such_test.py: no such file or folder"),
        (["--json", "no/such/a.json"], "--json no/such/a.json: there is no folder no/such"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_tests.parsed(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_files_with_gpu_tests_stand_once() -> None:
    files = gpu_tests.files_with_gpu_tests()
    assert files[0] == "sublight/ops" and "sublight/timing_test.py" in files
    assert not any(path.startswith("sublight/ops/") for path in files) and len(set(files)) == len(files)
