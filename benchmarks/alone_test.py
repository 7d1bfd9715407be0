"""While one process has its turn no other of them runs; they go on after it, also where it dies in its turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import alone

FILE = Path(__file__).with_name("alone.py")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


LOAD = f"import sys\nsys.path.insert(0, {str(FILE.parent)!r})\nimport alone\n"
STEP = "print('step', flush=True); sys.stdin.readline()\n"  # tells us, and goes on when we say so


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []
    yield made
    for process in made:
        process.kill()
        process.communicate()


def start(body: str, made: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LOAD + body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    made.append(process)
    return process


def state(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(process: subprocess.Popen[str], wanted: str) -> None:
    until_s = time.monotonic() + 30.0
    while (state(process) == "T") != (wanted == "stopped"):
        assert time.monotonic() < until_s, f"never {wanted}: {state(process)}"
        time.sleep(0.01)


@pytest.mark.parametrize("ends", ["says so", "dies"])
def test_the_others_stand_still(ends: str, processes: list[subprocess.Popen[str]]) -> None:
    with alone.Referee() as referee:
        bystander = start("print('here', flush=True); sys.stdin.readline()", processes)
        assert bystander.stdout is not None and bystander.stdout.readline() == "here\n"
        timed = start(f"alone.begin()\n{STEP}alone.end()\n{STEP}", processes)
        assert timed.stdout is not None and timed.stdin is not None and timed.stdout.readline() == "step\n"
        assert state(bystander) == "T" and state(timed) != "T"
        if ends == "dies":
            os.kill(timed.pid, signal.SIGKILL)
        else:
            print(file=timed.stdin, flush=True)
        wait_for(bystander, "running")
    assert len(referee.turns_s) == 1


def test_turns_follow_each_other(processes: list[subprocess.Popen[str]]) -> None:
    with alone.Referee():
        first = start(f"alone.begin()\n{STEP}alone.end()\n{STEP}", processes)
        assert first.stdout is not None and first.stdin is not None and first.stdout.readline() == "step\n"
        second = start(f"alone.begin()\n{STEP}", processes)  # started in the first one's turn: it waits for its own
        print(file=first.stdin, flush=True)
        assert second.stdout is not None and second.stdout.readline() == "step\n"
        assert state(first) == "T" and state(second) != "T"
    wait_for(first, "running")


def test_nothing_waits_without_a_referee(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(alone.ADDRESS, raising=False)
    alone.begin()
    alone.end()
