"""A grader that stays for a few minutes: the next check does not wait for torch and Triton to load.

The first check starts it as a process of the user's own; it listens on a socket in a folder that nobody else may enter,
and leaves when nobody has asked for IDLE_S. Its name holds what it was made from, so that changed code gets a new one.
SUBLIGHT_LEARN_STAY=0 keeps every check in its own process. Run as `python -m sublight.learn.grade.standing SOCKET`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sublight.errors import BadInput
from sublight.gpus import UnknownGpu
from sublight.learn.record import Exercise
from sublight.learn.verdict import Fault, KernelFigures, Timing, Verdict

IDLE_S = 300.0
START_S = 60.0  # until it listens, which it does before it loads anything
LOOK_S = 0.05
PACKAGE = Path(__file__).resolve().parents[2]


class Unreachable(Exception):
    """No grader stays here, or it ended: the check has to be made in this process."""


def is_wanted() -> bool:
    return sys.platform == "linux" and os.environ.get("SUBLIGHT_LEARN_STAY") != "0"


def check(exercise: Exercise, source: str, *, gpu: str, file: str) -> Verdict:
    """Ask the grader that stays, after starting it where there is none."""
    with _connected() as connection, connection.makefile("rw", encoding="utf-8") as channel:
        try:
            channel.write(json.dumps({"exercise": exercise.name, "source": source, "gpu": gpu, "file": file}) + "\n")
            channel.flush()
            reply = json.loads(channel.readline())
        except (OSError, ValueError):
            raise Unreachable from None
    if "refused" in reply:
        raise BadInput(reply["refused"])
    if "verdict" not in reply:
        raise Unreachable
    return _verdict(reply["verdict"])


def _verdict(data: dict[str, Any]) -> Verdict:
    lists = {name: tuple(data[name]) for name in ("cases", "notes")}
    faults = tuple(Fault(**each) for each in data["faults"])
    kernels = tuple(KernelFigures(**each) for each in data["kernels"])
    timing = Timing(**{**data["timing"], "runs_s": tuple(data["timing"]["runs_s"])}) if data["timing"] else None
    return Verdict(**{**data, **lists, "faults": faults, "kernels": kernels, "timing": timing})


def _connected() -> socket.socket:
    address, started = address_of(_folder()), None
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(address))
            return connection
        except OSError:
            connection.close()
        if started is None:
            started = _start(address)
        elif started.poll():  # 0: another one was faster
            break
        time.sleep(LOOK_S)
    raise Unreachable


def _start(address: Path) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "sublight.learn.grade.standing", str(address)],
        env={"OMP_WAIT_POLICY": "passive", **kept, "PYTHONPATH": path},  # threads that spin take the children's cores
        cwd="/",
        start_new_session=True,  # Ctrl-C ends the check, not the grader
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def address_of(folder: Path) -> Path:
    """The socket of a grader that was made from the code as it is now."""
    newest = max(file.stat().st_mtime_ns for file in PACKAGE.rglob("*.py"))
    made_from = (sys.executable, PACKAGE, newest, os.environ.get("PYTHONPATH"), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return folder / f"learn-{hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]}.sock"


def _folder() -> Path:
    """The user's own: another user who made it first could read submissions, or answer in the grader's name."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"sublight-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    except OSError:
        raise Unreachable from None
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise Unreachable
    return folder


def stay(address: Path, idle_s: float = IDLE_S) -> None:
    """Answer one check after another until nobody asks any more."""
    held = address.with_suffix(".lock")
    lock = os.open(held, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return  # another one stays here
    address.unlink(missing_ok=True)  # of one that was killed
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        listening.settimeout(idle_s)
        from sublight.learn.grade.crew import Crew

        try:
            with Crew() as crew, contextlib.suppress(TimeoutError):
                importlib.import_module("sublight.learn.grade.check")  # with torch, while the crew loads it, too
                is_ready = True
                while is_ready:
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError, ValueError):
                        connection.settimeout(None)
                        is_ready = _answer(connection, crew)
        finally:
            address.unlink(missing_ok=True)
            held.unlink(missing_ok=True)
            os.close(lock)


def _answer(connection: socket.socket, crew: Any) -> bool:
    """Make one check; whether the crew is there for another."""
    from sublight.learn.exercises import find
    from sublight.learn.grade.check import check as grade
    from sublight.learn.grade.crew import CrewGone
    from sublight.learn.target import target

    is_ready = True
    with connection.makefile("rw", encoding="utf-8") as channel:
        order = json.loads(channel.readline())
        try:
            gpu = target(order["gpu"])
            verdict = grade(find(order["exercise"]), order["source"], crew=crew, gpu=gpu, file=order["file"])
            data = dataclasses.asdict(dataclasses.replace(verdict, drawn_by=None))
            reply: dict[str, Any] = {"verdict": {name: value for name, value in data.items() if name != "drawn_by"}}
        except CrewGone:  # the check is made again, by a crew of its own
            reply, is_ready = {}, False
        except (BadInput, UnknownGpu) as error:
            reply = {"refused": str(error)}
        except Exception:  # a fault of ours: the check is made again where its traceback is seen
            reply = {}
        channel.write(json.dumps(reply) + "\n")
    return is_ready


if __name__ == "__main__":
    stay(Path(sys.argv[1]))
