"""Why there is nothing to explain: one true sentence for each way in which a script's work is out of sight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from sublight.trace.capture import guard
from sublight.trace.capture.profile_test import NET, TRAIN, Capture, runner


@pytest.fixture(name="run")
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Capture:
    return runner(tmp_path, monkeypatch)


def in_function(call: str) -> str:
    body = "".join(f"    {line}\n" for line in TRAIN.splitlines())
    return f"{NET}\ndef train():\n{body}\n{call}\n"


@pytest.mark.parametrize("end", ["thread.join()", "pass  # Python waits for it"])
def test_steps_on_another_thread(run: Capture, end: str) -> None:
    start = f"import threading\nthread = threading.Thread(target=train, name='trainer'); thread.start(); {end}"
    captured = run(in_function(start)).captured
    assert captured.trace is None and captured.exit_code == 0
    assert captured.reason.startswith("the script's steps ran on another thread (trainer), and only the main thread")


WORK = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass\n"


@pytest.mark.parametrize(
    "source",
    [
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORK!r}], check=True)\n",
        f"import multiprocessing, torch\ntorch.ones(3) + 1\ndef work():\n    exec({WORK!r})\n"
        "child = multiprocessing.get_context('fork').Process(target=work); child.start(); child.join()\n",
    ],
)
def test_work_in_child_processes(run: Capture, source: str) -> None:
    captured = run(source).captured
    assert captured.trace is None
    assert captured.reason.startswith("the script's work ran in child processes, and only the process that is started")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("print(1)\n", "the script ran no torch op"),
        ("import torch\n", "the script ran no torch op"),
        ("raise KeyError('x')\n", "the script failed before it ran a torch op (KeyError)"),
        ("raise KeyboardInterrupt\n", "the script was interrupted before it ran a torch op"),
        ("import sys\nsys.exit(3)\n", "the script ended itself before it ran a torch op"),
        ("import sys\nsys.exit()\n", "the script ran no torch op"),
    ],
)
def test_a_script_without_ops(run: Capture, source: str, reason: str) -> None:
    captured = run(source).captured
    assert captured.trace is None and captured.reason == reason


def test_a_pool_that_is_never_shut_down_is_not_waited_for(run: Capture) -> None:
    """Its threads end when Python does, which is after the report."""
    pool = (
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\npool.submit(print, 'in it')\n"
    )
    assert run(pool + "import torch\ntorch.ones(3) + 1\n").captured.trace is not None


def test_what_a_pool_still_has_to_do_is_waited_for(run: Capture, tmp_path: Path) -> None:
    """Ten pieces of work in the queue when the script ends, each of which takes a moment."""
    done = tmp_path / "done"
    pool = (
        "from concurrent.futures import ThreadPoolExecutor\nimport time, torch\n"
        f"def work(n):\n    time.sleep(0.03); open({str(done)!r}, 'a').write('x')\n"
        "pool = ThreadPoolExecutor(2)\nfor n in range(10): pool.submit(work, n)\ntorch.ones(3) + 1\n"
    )
    assert run(pool).captured.trace is not None
    assert done.read_text() == "x" * 10


SHUT_DOWN = "pool = ThreadPoolExecutor(2)\n    list(pool.map(abs, range(4)))\n    pool.shutdown()\n"
OF_PROCESSES = (
    "pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn'))\n"
    "    for n in range(3): pool.submit(time.sleep, 0.1).add_done_callback(lambda each: print('done', flush=True))\n"
)


@pytest.mark.parametrize(("pool", "printed"), [(SHUT_DOWN, ""), (OF_PROCESSES, "done\n" * 3)])
def test_a_pool_that_the_script_keeps_holds_nothing_up(tmp_path: Path, pool: str, printed: str) -> None:
    """In a process of its own: what once went wrong here is a wait without an end."""
    (tmp_path / "pool.py").write_text(
        "import multiprocessing, time\nfrom concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor\n"
        f"if __name__ == '__main__':\n    {pool}"
    )
    ours = (
        "from sublight.trace.capture.script import check, run\nprint(run(check('pool.py', (), module=False)).exit_code)"
    )
    done = subprocess.run([sys.executable, "-c", ours], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == printed + "0\n" and not done.stderr


def test_process_groups_and_the_module_outlive_the_script(run: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped inside the script, a group joins threads that wait for the interpreter: a hang in one run of three."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch.distributed sets its own, and leaves it
    source = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + __file__ + ".store", rank=0, world_size=1)
group = dist.new_group([0])
dist.all_reduce(torch.ones(3))
del group
dist.destroy_process_group()
class Mark: pass
mark = Mark()
"""
    captured = run(source).captured
    module, *groups = captured.kept
    assert type(module.mark).__name__ == "Mark"
    assert len(groups) == 2 and all(isinstance(group, torch.distributed.ProcessGroup) for group in groups)
    assert torch.distributed.destroy_process_group.__module__ == "torch.distributed.distributed_c10d"
    assert guard.__file__ not in torch.distributed.destroy_process_group.__code__.co_filename
