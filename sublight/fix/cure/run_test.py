"""A script in a process and a folder of its own: timed, compared, ended; the user's folder stays bit by bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sublight.fix.cure import landlock
from sublight.fix.cure.run import Rerun, interrupting, limit_after
from sublight.fix.cure.scratch import Scratch
from sublight.fix.cure.scratch_test import contents

torch = pytest.importorskip("torch")
TRAIN = """\
import sys
import torch
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    net(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({"step": step}, "checkpoint.pt")
    if len(sys.argv) > 2 and step > 3 and optimizer.param_groups[0]["fused"]:
        raise ValueError("it is fused")
open("end", "w")
"""
WRITES = """\
import contextlib, os, shutil, subprocess, sys, tempfile, torch
there, inside = sys.argv[1], sys.argv[2]
def refused(write, *args):
    try:
        write(*args)
    except PermissionError:
        return
    print("not refused", args, file=sys.stderr)
    os._exit(1)
refused(open, there + "/open", "w")
refused(torch.save, {}, there + "/saved")
refused(os.remove, there + "/old")
refused(shutil.rmtree, there)
refused(os.replace, __file__, there + "/old")
child = [sys.executable, "-c", f"open({there!r} + '/child', 'w')"]
assert b"PermissionError" in subprocess.run(child, stderr=subprocess.PIPE).stderr
subprocess.run(["rm", there + "/old"], stderr=subprocess.DEVNULL)
open(inside, "w").write("in the copy")
tempfile.NamedTemporaryFile()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with the checkpoint of a finished run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "checkpoint.pt").write_bytes(b"of a finished run")
    return folder


def rerun(folder: Path, *args: str, target: str = "train.py", module: bool = False, **options: Any) -> Rerun:
    options.setdefault("limit_s", 300.0)
    return Rerun(target=target, args=args, module=module, scratch=Scratch(folder=str(folder)), **options)


def test_a_run_is_timed_compared_and_ended(here: Path) -> None:
    (here / "random.py").write_text("raise SystemExit('a module of ours was looked for in the user's folder')")
    before = contents(here)
    first = rerun(here, "100000").run()
    again = rerun(here, "100000", target="train", module=True).run(["fused optimizer"])
    assert first.error == again.error == "" and not first.refused and contents(here) == before
    assert first.step_s is not None and 0 < first.step_s < 1 and first.steps_from == "optimizer steps"
    assert first.figures_of == "losses" and first.figures == pytest.approx(again.figures)  # it sets no seed: we do
    assert again.did == {"fused optimizer": "SGD: fused=True"}
    assert [(edit.file, edit.line) for edit in again.edits] == [(str(here / "train.py"), 4)], "the user's own file"


def test_a_script_that_fails_under_a_cure(here: Path) -> None:
    before = contents(here)
    outcome = rerun(here, "100", "fails").run(["fused optimizer"])
    assert outcome.step_s is None and outcome.error == "ValueError: it is fused" and contents(here) == before


def test_a_script_that_ends_too_early_and_one_that_is_not_there(here: Path) -> None:
    outcome = rerun(here, "4").run()
    assert outcome.step_s is None and "too few to time" in outcome.error
    outcome = rerun(here, target="gone.py").run()
    assert outcome.step_s is None and "gone.py" in outcome.error


def test_a_script_that_finds_its_results_already_there(here: Path) -> None:
    text = "import os, sys\nif os.path.exists('checkpoint.pt'):\n    sys.exit('already trained')\n"
    (here / "once.py").write_text(text + TRAIN)
    outcome = rerun(here, "100", target="once.py").run()
    assert outcome.error.startswith("it left saying 'already trained' before its steps were timed; its copy")


def test_what_it_would_write_elsewhere_is_refused_and_named(here: Path) -> None:
    there = here.parent / "there"
    there.mkdir()
    (there / "old").write_text("somebody's")
    (here / "mine.txt").write_text("before")
    (here / "writes.py").write_text(WRITES)
    kernel = bool(landlock.version())
    if not kernel:
        (here / "writes.py").write_text(WRITES.replace('["rm"', '["true"'))
    time.sleep(0.02)  # a file's time is as coarse as the kernel's clock
    before = contents(here.parent)
    outcome = rerun(here, str(there), str(here / "mine.txt"), target="writes.py").run()
    assert outcome.error.startswith("no steps were found"), outcome.error
    assert contents(here.parent) == before
    names = [str(there / name) for name in ("open", "saved", "old")]
    assert outcome.refused == (*names, str(there), str(there / "child"))


def test_the_diff_is_what_runs_and_what_fails_after_the_timed_steps_counts(here: Path) -> None:
    before = contents(here)
    head = "--- a/train.py\n+++ b/train.py\n@@ -9,2 +9,4 @@\n"
    more = '+    if step == 200:\n+        raise ValueError("by the diff")\n'
    diff = head + '     torch.save({"step": step}, "checkpoint.pt")\n' + more + "     if len(sys.argv) > 2 and"
    diff += ' step > 3 and optimizer.param_groups[0]["fused"]:\n'
    outcome = rerun(here, "100000").run(diff=diff)
    assert outcome.error == "ValueError: by the diff" and outcome.step_s is not None and contents(here) == before
    outcome = rerun(here, "100").run(diff=diff.replace(" > 3", " > 4"))
    assert "does not fit to line 10" in outcome.error


@pytest.mark.parametrize("name", ["src/mod.py", "linked.py"])
def test_no_diff_is_written_through_a_link(here: Path, name: str) -> None:
    """What is excluded, and what is a link of the user's, leads out of the copy."""
    (here / "src").mkdir()
    (here.parent / "theirs.py").write_text("a = 1\n")
    (here / "src" / "mod.py").write_text("a = 1\n")
    (here / "linked.py").symlink_to("../theirs.py")
    run = Rerun(target="train.py", args=(), module=False, scratch=Scratch(folder=str(here), exclude=("src",)))
    before = contents(here.parent)
    outcome = run.run(diff=f"--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-a = 1\n+a = 2\n")
    assert "is no part of the scratch copy" in outcome.error and contents(here.parent) == before


# ------------------------------------------------------------------------------------------------ the end of a run

TREE = ["sh", "-c", "sleep 600 & echo $! > child; mv child ../child; wait"]  # a process and its child


def is_gone(folder: Path) -> bool:
    """The child's process, which would sleep for ten minutes, ends: it dies when it is next scheduled."""
    number = int((folder.parent / "child").read_text())
    until_s = time.monotonic() + 60
    while is_alive(number) and time.monotonic() < until_s:
        time.sleep(0.01)
    return not is_alive(number)


def is_alive(number: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait(here: Path, limit_s: float) -> tuple[int, bool]:
    return rerun(here, limit_s=limit_s)._wait(TREE, str(here), dict(os.environ), here.parent / "stderr")


def test_a_run_that_takes_too_long_ends_with_all_its_processes(here: Path) -> None:
    assert wait(here, 3.0)[1] and is_gone(here)
    outcome = rerun(here, limit_s=0.05).run()
    assert outcome.error == "it was ended after 50.0 ms, the limit of a run (--limit)" and outcome.step_s is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_all_its_processes(here: Path, number: int) -> None:
    def interrupt() -> None:
        while not (here.parent / "child").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), interrupting():
        wait(here, 300.0)
    assert is_gone(here) and signal.getsignal(number) is before


def test_the_copy_goes_when_the_command_is_interrupted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[str] = []

    def interrupted(self: Rerun, names: object, copy: str, *, goes_on_s: float) -> None:
        copies.append(copy)
        Path(copy, "checkpoint.pt").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Rerun, "_run", interrupted)
    before = contents(here)
    with pytest.raises(KeyboardInterrupt):
        rerun(here).run()
    assert contents(here) == before and not Path(copies[0]).exists()


def test_a_limit_comes_from_the_first_run() -> None:
    assert [limit_after(first_s) for first_s in (1.0, 100.0, 1e6)] == [120.0, 200.0, 3600.0]


def test_caches_of_the_folder_are_not_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is there and lies elsewhere is used; one in the folder, or above it, is another in a trial."""
    (here / "hf").mkdir()
    (here.parent / "torch").mkdir()
    monkeypatch.setenv("HF_HOME", str(here / "hf"))
    monkeypatch.setenv("TORCH_HOME", str(here.parent / "torch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(here.parent))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(here.parent / "not there"))
    kept, moved = rerun(here)._caches(here.parent / "own")
    assert str(here.parent / "torch") in kept and "TORCH_HOME" not in moved
    own = here.parent / "own" / "caches"
    for name in ("HF_HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        assert moved[name] == str(own / name.lower())
    assert not any(str(here.parent) == path or path.startswith(str(here)) for path in kept)


def test_the_users_own_sitecustomize_still_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here.parent / "site").mkdir()
    (here.parent / "site" / "sitecustomize.py").write_text("print('theirs')")
    monkeypatch.setenv("PYTHONPATH", str(here.parent / "site"))
    own = here.parent / "own"
    own.mkdir()
    environment = rerun(here)._environment(own, str(here))
    words = [sys.executable, "-c", "import sys; print(sys.modules['sublight_fence'].FENCE.protected)"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"theirs\n{here}\n" and done.stderr == ""
