"""A process from outside, through py-spy where it is installed: one that runs already, or with its native frames."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sublight.errors import BadInput
from sublight.pyprof.record import PythonProcess, PythonProfile
from sublight.sampling import Frame, Row, Samples

MISSING = "py-spy is not installed: pip install py-spy"
_THREAD = re.compile(r'^(?:Process (\d+) )?Thread (\S+?)(?: "(.*)")?$')
_HEADING = re.compile(r'thread \(|process \d+:"')  # what py-spy puts above a stack
LONGEST_S = 10**6


def program() -> str:
    """Beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise BadInput(MISSING)
    return found


def attach(
    pid: int, *, hz: float, seconds: float, native: bool, say: Callable[[str], None] = lambda line: None
) -> PythonProfile:
    """Look at a running process for so long, or until it ends, or until Ctrl-C."""
    found = program()
    if not os.path.exists(f"/proc/{pid}") and sys.platform == "linux":
        raise BadInput(f"there is no process {pid}")
    say(f"looking at process {pid} for {seconds:g} s; Ctrl-C ends it with the report")
    return _record(found, pid, command_of(pid), hz=hz, seconds=seconds, native=native)


def run(words: Sequence[str], *, hz: float) -> PythonProfile:
    """Start a program and look at it from outside, with its native frames; the first moments are missing."""
    found = program()
    child = subprocess.Popen([sys.executable, *words])
    try:
        command = " ".join(["python", *words])
        profile = _record(found, child.pid, command, hz=hz, seconds=LONGEST_S, native=True)
    except BaseException:
        child.kill()
        child.wait()
        raise
    code = child.wait()
    return replace(profile, exit_code=code if code >= 0 else 128 - code)


def command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"process {pid}"
    return " ".join(os.fsdecode(word) for word in words if word)


def _record(found: str, pid: int, command: str, *, hz: float, seconds: float, native: bool) -> PythonProfile:
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sublight-pyspy-") as folder:
        file = Path(folder) / "profile.json"
        options = ["--pid", str(pid), "--rate", str(max(1, round(hz))), "--format", "speedscope", "--output", str(file)]
        options += ["--idle", "--threads", "--subprocesses", *(["--native"] if native else [])]
        if seconds < LONGEST_S:
            options += ["--duration", str(max(1, round(seconds)))]
        spy = subprocess.Popen(
            [found, "record", *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            _, words = spy.communicate()
        except KeyboardInterrupt:  # it was sent to py-spy, too, which writes what it has
            _, words = spy.communicate()
        if not file.exists():
            raise BadInput(f"py-spy could not look at process {pid}: {reason(words)}")
        data = json.loads(file.read_bytes())
    return PythonProfile(
        mode="sample",
        command=command,
        hz=hz,
        wall_s=time.perf_counter() - began_s,
        processes=tuple(processes(data, pid, command)),
        notes=("seen from outside by py-spy, which does not tell who ran: a thread that sleeps counts in full",),
    )


def reason(words: str) -> str:
    """py-spy's own line on what went wrong.

    >>> reason("Error: Failed to open process\\nReason: Permission denied (os error 13)\\n")
    'Permission denied (os error 13); run as root, or set kernel.yama.ptrace_scope to 0'
    >>> reason("")
    'it gave no reason'
    """
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    reasons = [line.partition(":")[2].strip() for line in lines if line.startswith(("Reason:", "Error:"))]
    last = (reasons or lines or ["it gave no reason"])[-1]
    denied = "ermission" in last or "not permitted" in last
    return f"{last}; run as root, or set kernel.yama.ptrace_scope to 0" if denied else last


def processes(data: dict[str, Any], pid: int, command: str) -> list[PythonProcess]:
    """py-spy's speedscope file as our record: a row for each thread and look, outermost frame first."""
    frames = tuple(
        Frame(str(one.get("file") or ""), str(one["name"]), int(one.get("line") or 0), 0)
        for one in data["shared"]["frames"]
    )
    no_function = {at for at, frame in enumerate(frames) if not frame.file and _HEADING.match(frame.function)}
    rows: dict[int, list[Row]] = {}
    names: dict[int, list[str]] = {}
    stacks: dict[tuple[int, ...], int] = {}
    for profile in data["profiles"]:
        match = _THREAD.match(profile["name"])
        owner = int(match[1]) if match and match[1] else pid
        name = (match[3] or f"thread {match[2]}") if match else profile["name"]
        threads = names.setdefault(owner, [])
        threads.append(name)
        at_ns = 0
        for stack, weight in zip(profile["samples"], profile["weights"], strict=True):
            wall_ns = round(weight * 1e9)
            at_ns += wall_ns
            kept = tuple(frame for frame in stack if frame not in no_function)
            if not kept:
                continue
            number = stacks.setdefault(kept, len(stacks))
            rows.setdefault(owner, []).append(Row(at_ns, len(threads) - 1, number, wall_ns, -1))
    order = sorted(names, key=lambda one: (one != pid, one))
    return [
        PythonProcess(
            pid=one,
            command=command if one == pid else command_of(one),
            samples=Samples(
                frames=frames,
                stacks=tuple(stacks),
                threads=tuple(names[one]),
                labels=("",),
                rows=tuple(rows.get(one, ())),
            ),
            looks=max(Counter(row.thread for row in rows.get(one, ())).values(), default=0),
            how="py-spy",
        )
        for one in order
    ]
