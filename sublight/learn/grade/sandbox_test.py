"""The limits, in a process of their own."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("the limits are Linux's", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
TRIALS = {  # code -> what it prints
    "socket.socket()": "PermissionError",
    "os.fork() or os._exit(0)": "PermissionError",
    "subprocess.run(['true'])": "PermissionError",
    "bytearray(10**9)": "MemoryError",
    "os.kill(os.getppid(), 0)": "PermissionError",
    "signal.pthread_kill(threading.get_ident(), 0)": "allowed",
    "threading.Thread(target=int).start()": "allowed",
    "open('/dev/null').read()": "allowed",
}


def tried(programs: bool) -> dict[str, str]:
    code = f"""
import os, signal, socket, subprocess, threading
from sublight.learn.grade.sandbox import Budget, confine
confine(Budget(memory_bytes=2**27), programs={programs})
for trial in {list(TRIALS)!r}:
    try:
        eval(trial)
        print("allowed")
    except BaseException as error:
        print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(zip(TRIALS, done.stdout.split(), strict=True))


def test_what_a_submission_cannot_do() -> None:
    assert tried(programs=False) == TRIALS


def test_a_compiler_may_start_programs_but_reach_no_network() -> None:
    allowed = {"os.fork() or os._exit(0)": "allowed", "subprocess.run(['true'])": "allowed"}
    assert tried(programs=True) == TRIALS | allowed


def test_a_process_may_abort_and_end_no_other() -> None:
    code = """
import ctypes, os
from sublight.learn.grade.sandbox import Budget, confine
confine(Budget(), programs=False)
libc, parent, tgkill = ctypes.CDLL(None, use_errno=True), os.getppid(), {"x86_64": 234, "aarch64": 131}
print(libc.syscall(tgkill[os.uname().machine], parent, parent, 0), ctypes.get_errno(), flush=True)
os.abort()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"-1 {errno.EPERM}\n", -signal.SIGABRT), done.stderr
