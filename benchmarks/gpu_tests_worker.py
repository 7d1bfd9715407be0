"""The part of gpu_tests.py that runs inside pytest: takes tests in small groups until none are left.

Every process collects the same tests in the same order. A group belongs to the process that first creates its file.
Each process appends to a file of its own: which tests it took, then what became of each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

JOB = "SUBLIGHT_GPU_TESTS"  # the environment variable with a `Job` in JSON
GROUP = 6  # neighbours launch the same kernels: in one process each is compiled once
BROKEN = 75  # exit status where a kernel's error has made the process useless for further tests
NO_MEMORY = ("OutOfMemoryError", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
TEXT = 3000  # characters of a failure that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    folder: str  # where groups are taken and results are written
    name: str  # of this process
    turn: str  # together; few, and alone: less and less for which memory did not suffice, at the end the `gpu_alone`
    share: float  # of the GPU's memory that this process may take
    whole: str  # of files whose path begins with it every test runs, of others those with the `gpu` mark
    first: tuple[str, ...] = ()  # tests that a process which died had taken and not begun
    again: tuple[str, ...] = ()  # tests for which memory did not suffice beside others


class Worker:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.reports: list[pytest.TestReport] = []  # of the test that runs

    def write(self, **line: Any) -> None:
        with (Path(self.job.folder) / f"{self.job.turn}-{self.job.name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def is_mine(self, item: pytest.Item) -> bool:
        if not item.nodeid.startswith(self.job.whole) and not item.get_closest_marker("gpu"):
            return False
        if item.get_closest_marker("gpu_alone"):
            return self.job.turn == "alone"
        return self.job.turn == "together" or item.nodeid in self.job.again

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(id=report.nodeid, outcome="failed", seconds=0, text=report.longreprtext[-TEXT:])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        others = [item for item in items if not self.is_mine(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if self.is_mine(item)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.write(collected=[item.nodeid for item in session.items])
        keep_to(self.job.share)
        tests = self.tests(session.items)
        item = next(tests, None)
        while item:
            following = next(tests, None)  # pytest keeps the fixtures that the next test shares
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        return True

    def tests(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        first = [item for item in items if item.nodeid in self.job.first]
        groups = [items[at : at + GROUP] for at in range(0, len(items), GROUP)]
        for number, group in enumerate([first, *groups]):
            if group and (group is first or self.takes(number)):
                self.write(took=[item.nodeid for item in group])
                yield from group
                if torch := sys.modules.get("torch"):
                    torch.cuda.empty_cache()  # memory that this process keeps is missing in the others

    def takes(self, number: int) -> bool:
        try:
            (Path(self.job.folder) / f"{self.job.turn}-{number}.taken").open("x").close()
        except FileExistsError:
            return False
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)
        if report.when != "teardown":
            return
        reports, self.reports = self.reports, []
        seconds = sum(each.duration for each in reports)
        worst = next((each for name in ("failed", "skipped") for each in reports if each.outcome == name), report)
        outcome, text = worst.outcome, worst.longreprtext[-TEXT:]
        if worst.skipped:
            text = str(worst.longrepr[2]) if isinstance(worst.longrepr, tuple) else "expected to fail"
        if worst.failed and any(words in text for words in NO_MEMORY):
            outcome = "memory"
        self.write(id=report.nodeid, outcome=outcome, seconds=seconds, text=text)
        if worst.failed and gpu_is_lost():
            os._exit(BROKEN)  # every further call would fail


def keep_to(share: float) -> None:
    """A test that wants more than its process's share fails itself, not those of other processes."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available() and share < 1:
        torch.cuda.set_per_process_memory_fraction(share)


def gpu_is_lost() -> bool:
    """After an error inside a kernel every call of CUDA in the process fails."""
    torch = sys.modules.get("torch")
    if not torch or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    if job := os.environ.get(JOB):
        config.pluginmanager.register(Worker(Job(**json.loads(job))))
