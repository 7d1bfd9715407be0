"""The grader that stays: it answers, says what is refused, and only one of it stays."""

from __future__ import annotations

import contextlib
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.errors import BadInput
from sublight.learn.exercises import find
from sublight.learn.grade import standing
from sublight.learn.grade.crew import CrewGone


@pytest.fixture
def grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In a thread of this process, without the processes that run submissions: the scan comes before them."""
    monkeypatch.setattr("sublight.learn.grade.crew.Crew", lambda: contextlib.nullcontext())
    monkeypatch.setattr(standing, "_folder", lambda: tmp_path)
    address = standing.address_of(tmp_path)
    thread = threading.Thread(target=standing.stay, args=(address, 1.0))
    thread.start()
    yield address
    thread.join()
    assert not list(tmp_path.iterdir())  # nothing is left of it


def test_a_verdict_comes_back_whole(grader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "_start", lambda address: pytest.fail("there is one already"))
    while not grader.exists():
        pass
    source = "import os\n\ndef add(x, y, out):\n    pass\n"
    verdict = standing.check(find("add"), source, gpu="h200", file="learn/add.py")
    assert [(fault.kind, fault.line) for fault in verdict.faults] == [("scan", 1)]
    assert (verdict.exercise, verdict.file, verdict.source, verdict.gpu) == ("add", "learn/add.py", source, "h200")
    with pytest.raises(BadInput, match="unknown GPU"):
        standing.check(find("add"), source, gpu="h2000", file="learn/add.py")
    standing.stay(grader)  # a second one leaves at once


def test_a_crew_that_was_ended_is_not_asked_again(grader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: object, **options: object) -> None:
        raise CrewGone("the process that runs submissions ended")

    monkeypatch.setattr("sublight.learn.grade.check.check", gone)
    while not grader.exists():
        pass
    with pytest.raises(standing.Unreachable):  # so the check is made again, by a crew of its own
        standing.check(find("add"), "def add(x, y, out):\n    pass\n", gpu="h200", file="learn/add.py")
    until = time.monotonic() + 0.9  # it would stay for a second
    while grader.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not grader.exists()


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = standing._folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(standing.Unreachable):
        standing._folder()


def test_it_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLIGHT_LEARN_STAY", "0")
    assert not standing.is_wanted()
