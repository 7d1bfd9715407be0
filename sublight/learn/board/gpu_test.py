"""A board that times, in a sandbox of its own with the GPU's devices; on a CPU a device stands for one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.gpus import find as find_gpu
from sublight.learn.board import grader, jail, processes
from sublight.learn.board.jail import Jail, Way
from sublight.learn.board.runner import outcome_of
from sublight.learn.exercises import find
from sublight.learn.grade.timed import Stopwatch
from sublight.learn.record import Goal

DEVICE = "/dev/tty"  # which every machine has, and no sandbox
SMALL = replace(find("add"), goal=Goal(shape={"numel": 1100}, fraction=1e-9))
ORDER = {"exercise": "add", "source": find("add").solution(), "gpu": "h200", "budget": {}}


@pytest.fixture
def base(way: Way, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jail:
    """A machine with one device, which is an H200."""
    monkeypatch.setattr("sublight.learn.grade.crew.detect", lambda: find_gpu("h200"))
    monkeypatch.setattr(jail, "gpu_devices", lambda: (DEVICE,))
    monkeypatch.setattr(os, "ST_NOEXEC", 0)  # nothing is loaded from a room here
    monkeypatch.setattr(grader, "find", lambda name: SMALL)
    on_cpu = partial(Stopwatch, device="cpu", most_sets=2, least_calls=2, runs=1)
    monkeypatch.setattr("sublight.learn.grade.timed.Stopwatch", on_cpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SUBLIGHT_LEARN_TIME", raising=False)
    folder = home / tmp_path.name
    folder.mkdir(0o711)
    return Jail(way=way, home=str(folder), user=jail.user_of(0))


def test_an_entry_is_timed_in_a_sandbox_that_has_the_device(base: Jail) -> None:
    bench = grader.Bench(base)
    try:
        verdict = grader._graded(bench, ORDER)["verdict"]
        assert verdict["passed"] and verdict["timed"]["sets"] == 2, verdict["faults"]
        assert len(bench.crew.rooms) == 2 and bench.is_clean()
        outcome = outcome_of(verdict, "no GPU")
        assert outcome.verdict["timed"]["case"] == "numel = 1100, float32" and outcome.verdict["not_timed"] == ""
    finally:
        bench.drop()
    assert not os.listdir(base.home) and not processes.below(os.getpid())


def test_only_the_sandbox_for_timing_has_the_device(base: Jail) -> None:
    base.make()
    timing = base.with_gpu()
    assert timing is not None
    for sandbox, answer in ((base, "confined"), (timing, "files of the server are in sight")):
        sandbox.admit(sandbox.room)
        command = [sys.executable, "-P", "-m", "sublight.learn.board.trial", sandbox.room, DEVICE, str(jail.ANSWERS)]
        done = subprocess.run(sandbox.around(command), env=jail.environment(), capture_output=True, text=True)
        assert done.stdout.strip() == answer, done.stderr


def test_without_a_device_nothing_is_timed(base: Jail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "gpu_devices", tuple)
    assert base.with_gpu() is None
    passed = {"passed": True, "fraction_predicted": 0.9, "timed": None, "faults": []}
    verdict = outcome_of({**passed, **dict.fromkeys(("cases", "kernels", "notes", "gpu", "goal"))}, "no GPU").verdict
    assert verdict["timed"] is None and verdict["not_timed"] == "no GPU"


def test_devices_are_a_gpus_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["null", "nvidia-modeset", "nvidia0", "nvidia1", "nvidia-uvm", "nvidiactl", "nvidia-caps", "sda"]
    monkeypatch.setattr(os, "listdir", lambda folder: names)
    assert jail.gpu_devices() == ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
    monkeypatch.setattr(os, "listdir", lambda folder: ["null", "nvidiactl"])
    assert jail.gpu_devices() == ()
