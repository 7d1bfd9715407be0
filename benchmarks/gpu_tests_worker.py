"""The part of gpu_tests.py that runs inside pytest: takes tests in small groups until none are left.

Every process collects the same tests in the same order, the longest first. A group belongs to the process that first
creates its file; groups that need much memory only to one that has a large share of it. Each process appends to a file
of its own: which tests it took, then what became of each.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

JOB = "SUBLIGHT_GPU_TESTS"  # the environment variable with a `Job` in JSON
GROUP_S = 6.0  # neighbouring tests launch the same kernels, which one process compiles only once
CASE_S = 1.0  # what a test takes that has no `gpu_seconds` mark
BROKEN = 75  # exit status where a kernel's error has made the process useless for further tests
NO_MEMORY = ("OutOfMemoryError", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
TEXT = 3000  # characters of a failure that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    folder: str  # where groups are taken and results are written
    name: str  # this process's name
    turn: str  # together; few, and alone: less and less for which memory did not suffice, at the end the `gpu_alone`
    share: float  # of the GPU's memory that this process may take
    whole: str  # of files whose path begins with it every test runs, of others those with the `gpu` mark
    large: bool = True  # whether it takes tests with the `gpu_large` mark; it takes them first
    first: tuple[str, ...] = ()  # tests that a process which died had taken and not begun
    again: tuple[str, ...] = ()  # tests for which memory did not suffice beside others


class Worker:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.reports: list[pytest.TestReport] = []  # of the test that runs
        self.has_failed = False  # the last test that ran

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
        for group in self.groups(session.items):
            for item, following in zip(group, [*group[1:], None], strict=True):  # pytest keeps what the next one shares
                if has_gpu():
                    sys.modules["torch"].cuda.reset_peak_memory_stats()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.has_failed:
                    forget_failure()
            if has_gpu():
                sys.modules["torch"].cuda.empty_cache()  # memory that this process keeps is missing in the others
        return True

    def groups(self, items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
        """The groups that this process takes, each when the one before has run."""
        first = [item for item in items if item.nodeid in self.job.first]
        numbered = [*enumerate(grouped(items))]
        if self.job.large:
            numbered.sort(key=lambda each: not is_large(each[1][0]))
        else:
            numbered = [each for each in numbered if not is_large(each[1][0])]
        for number, group in [(-1, first), *numbered]:
            if group and (group is first or self.takes(number)):
                self.write(took=[item.nodeid for item in group])
                yield group

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
        memory_bytes = sys.modules["torch"].cuda.max_memory_allocated() if has_gpu() else 0
        self.write(id=report.nodeid, outcome=outcome, seconds=seconds, text=text, memory_bytes=memory_bytes)
        self.has_failed = worst.failed
        if worst.failed and gpu_is_lost():
            os._exit(BROKEN)  # CUDA is lost for this process: every further test would fail


def grouped(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Neighbours that take about `GROUP_S` together; what needs much memory apart from what does not."""
    groups: list[list[pytest.Item]] = []
    seconds = GROUP_S
    for item in items:
        if seconds >= GROUP_S or is_large(item) != is_large(groups[-1][0]):
            groups.append([])
            seconds = 0.0
        groups[-1].append(item)
        mark = item.get_closest_marker("gpu_seconds")
        seconds += mark.args[0] if mark else CASE_S
    return groups


def is_large(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu_large") is not None


def forget_failure() -> None:
    """The traceback of a test that failed keeps its tensors: without this the tests after it lack the memory."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    gc.collect()  # frames and exceptions refer to one another
    if has_gpu():
        sys.modules["torch"].cuda.empty_cache()


def has_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def keep_to(share: float) -> None:
    """A test that wants more than its process's share fails itself, not those of other processes."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available() and share < 1:
        torch.cuda.set_per_process_memory_fraction(share)


def gpu_is_lost() -> bool:
    """After an error inside a kernel every call of CUDA in the process fails."""
    if not has_gpu():
        return False
    try:
        sys.modules["torch"].cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    if job := os.environ.get(JOB):
        config.pluginmanager.register(Worker(Job(**json.loads(job))))
