"""The sandbox from inside: what code that got past everything else can read, reach, start and outlive."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sublight.errors import BadInput
from sublight.learn.board import jail, processes, trial
from sublight.learn.board.jail import ANSWERS, PACKAGE, Jail, Way
from sublight.learn.grade.buffers import Shared
from sublight.learn.grade.scratch import made, tail

OUTCOMES = {  # what is tried inside -> what comes of it
    "os.listdir(ANSWERS)": "[]",
    "open(DATABASE).read()": "FileNotFoundError",
    "open(OTHERS).read()": "FileNotFoundError",
    "open('/etc/passwd').read()": "FileNotFoundError",
    "'SECRET' in open('/proc/1/environ').read()": "PermissionError or False",  # of bubblewrap's first process
    "open('/proc/self/mem', 'rb+')": "PermissionError",
    "open(PACKAGE + '/correct.py', 'a')": "PermissionError or OSError",  # by another user, read-only
    "os.mkdir('/tmp/x')": "PermissionError or OSError",
    "os.mkdir('/dev/shm/x')": "PermissionError or OSError",
    "socket.create_connection(('127.0.0.1', PORT), 2)": "PermissionError",
    "socket.socket(socket.AF_UNIX)": "PermissionError",
    "libc.unshare(0x10000000)": "-1",
    "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)": "-1",
    "libc.syscall(CLONE, 0x10000011, 0, 0, 0, 0)": "-1",  # a process with users of its own
    "libc.setuid(0)": "-1",
    "os.kill(OUTSIDE, 9)": "PermissionError",
    "'SECRET' in str(os.environ)": "False",
    "sorted(int(each) for each in os.listdir('/proc') if each.isdecimal())[:1]": "[1]",
    "fork_all()": "fewer than 64",
    "open('mine', 'w').write('x')": "1",
}
PROGRAM = """
import ctypes, json, os, socket, sys, time
from sublight.learn.grade.sandbox import Budget, confine
values = json.loads(sys.argv[1])
confine(Budget(memory_bytes=2**28), programs=True)
os.chdir(values["ROOM"])
libc = ctypes.CDLL(None)

def fork_all():
    for count in range(1000):
        try:
            child = os.fork()
        except OSError:
            return "fewer than 64" if count < 64 else count
        if child == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)
    return "no end"

for trial in values["TRIALS"]:
    try:
        print(json.dumps([trial, str(eval(trial, globals() | values))]), flush=True)
    except BaseException as error:
        print(json.dumps([trial, type(error).__name__]), flush=True)
"""


def test_what_code_inside_can_do(way: Way, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLIGHT_SECRET", "SECRET")
    sandbox = Jail(way=way, home=str(home / "attacked"), user=jail.user_of(1))
    os.mkdir(sandbox.home, 0o711)
    sandbox.make()
    sandbox.admit(sandbox.room)
    (tmp_path / "board.sqlite").write_text("everybody's code")
    (home / "other-submission").write_text("somebody's code")
    Path(sandbox.room, "attack.py").write_text(PROGRAM)
    with subprocess.Popen(["sleep", "60"]) as outside:
        values = {
            "ANSWERS": str(ANSWERS),
            "DATABASE": str(tmp_path / "board.sqlite"),
            "OTHERS": str(home / "other-submission"),
            "PACKAGE": str(PACKAGE),
            "ROOM": sandbox.room,
            "OUTSIDE": outside.pid,
            "PORT": 9,
            "CLONE": {"x86_64": 56, "aarch64": 220}[platform.machine()],
            "TRIALS": list(OUTCOMES),
        }
        command = [sys.executable, "-P", "-m", "attack", json.dumps(values)]
        environment = jail.environment()
        environment["PYTHONPATH"] += f":{sandbox.room}"
        done = subprocess.run(
            sandbox.around(command), env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert outside.poll() is None
        outside.kill()
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert list(found) == list(OUTCOMES), done.stderr
    assert {each: found[each] for each in found if found[each] not in OUTCOMES[each].split(" or ")} == {}
    assert not [each for each in processes.below(os.getpid()) if "attack" in _words(each)]  # sixty had a session each


def _words(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def test_stopped_and_dead_processes_are_not_awake() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        while processes.awake(os.getpid()) != 1:
            time.sleep(0.01)
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            sleeper.send_signal(signal_number)
            while processes.awake(os.getpid()):
                time.sleep(0.01)
            assert processes.below(os.getpid()) == [sleeper.pid]  # nobody has waited for it


def test_a_sandbox_ends_with_whoever_made_it(way: Way, home: Path) -> None:
    sandbox = Jail(way=way, home=str(home / "left"), user=jail.user_of(2))
    os.mkdir(sandbox.home, 0o711)
    sandbox.make()
    sleeper = [sys.executable, "-P", "-m", "timeit", "-n", "1", "-r", "1", "-s", "import time", "time.sleep(600)"]
    code = f"""
import subprocess
from sublight.learn.board import jail
subprocess.run(jail.{sandbox!r}.around({sleeper!r}), env=jail.environment())
"""
    with subprocess.Popen([sys.executable, "-c", code], env=jail.environment()) as maker:
        inside: list[int] = []
        while not any("timeit" in _words(each) for each in inside):
            time.sleep(0.02)
            inside = processes.below(maker.pid)
        maker.kill()
    end_s = time.monotonic() + 60
    while any("timeit" in _words(each) for each in inside) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not any("timeit" in _words(each) for each in inside)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [("shown", "files of the server are in sight"), ("HIDDEN", "solutions are in sight")],
)
def test_a_sandbox_that_leaks_is_not_used(
    way: Way, home: Path, monkeypatch: pytest.MonkeyPatch, change: str, complaint: str
) -> None:
    right = jail.shown()
    monkeypatch.setattr(jail, change, {"shown": lambda: [*right, str(home)], "HIDDEN": ()}[change])
    found, reason = jail.usable(home, way)
    assert found is None and complaint in reason


def test_packages_of_another_environment_are_shown_and_a_users_own_folder_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a .pth file names them."""
    origins = {"torch": "/opt/other/site-packages/torch/__init__.py", "triton": "/home/ann/python/triton/__init__.py"}
    specs = {name: SimpleNamespace(origin=origin) for name, origin in origins.items()}
    monkeypatch.setattr(jail.importlib.util, "find_spec", specs.get)
    assert jail._installed() == ["/opt/other/site-packages"]


def test_without_a_sandbox_nothing_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "_trouble", lambda each: "forbidden here")
    monkeypatch.setattr(jail.shutil, "which", lambda name: None)
    found, reason = jail.usable(home)
    assert found is None and "bubblewrap is not installed" in reason and "namespaces: forbidden here" in reason


def test_the_trial_itself_sees_an_open_machine(tmp_path: Path) -> None:
    assert trial.trouble(str(tmp_path), str(tmp_path / "nothing"), str(tmp_path / "nothing")) != ""


def test_files_that_a_submission_shares_are_not_trusted(tmp_path: Path) -> None:
    """A link that code inside puts in the place of a file is neither read nor written through."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for place in ("printed", "0-in-0"):
        (tmp_path / place).symlink_to(secret)
    assert tail(tmp_path / "printed", 100) == b""
    os.mkfifo(tmp_path / "pipe")
    assert tail(tmp_path / "pipe", 100) == tail(tmp_path / "none", 100) == b""
    os.close(made(tmp_path / "0-in-0", b"poison"))
    assert secret.read_text() == "secret" and (tmp_path / "0-in-0").read_bytes() == b"poison"
    torch = pytest.importorskip("torch")
    shared = Shared.like(torch.zeros(3), tmp_path / "1-out-0")
    (tmp_path / "1-out-0").unlink()
    (tmp_path / "1-out-0").symlink_to(secret)
    shared.poison()
    assert secret.read_text() == "secret"
    with pytest.raises(BadInput, match="cannot be made"):
        made(tmp_path / "no folder" / "x", b"")
