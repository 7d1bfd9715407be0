"""A sandbox around the processes that run strangers' code: its own file system, network, processes and user.

Inside there are Python, this package without its exercises, and one scratch folder; everything is read-only but that
folder. Bubblewrap makes it where it is installed; else `outside.py` does the same with Linux's namespaces. A server
that runs as root gives each sandbox a user of its own, which bubblewrap could not: then `outside.py` comes first.
Where neither works the server runs nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Way = Literal["bubblewrap", "namespaces"]
WAYS: tuple[Way, ...] = ("bubblewrap", "namespaces")
PACKAGE = Path(__file__).resolve().parents[2]
ANSWERS = PACKAGE / "learn" / "exercises"  # with their solutions
HIDDEN = (ANSWERS,)
FIRST_USER, USERS = 61184, 1024  # numbers that systemd, too, gives to users that live for a while
NOBODY = 65534
TRIAL_S = 60.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives",
           "/sys/devices/system/cpu")  # fmt: skip
DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """One sandbox; a `grade.crew.Sandbox`."""

    way: Way
    home: str  # a folder for this sandbox alone, which the server makes and removes
    user: int = NOBODY  # by number, outside; where the server is not root it is the server's own
    devices: tuple[str, ...] = ()  # of a GPU

    @property
    def room(self) -> str:
        """What the grader and the sandbox see both."""
        return os.path.join(self.home, "room")

    def make(self) -> None:
        for folder in (self.room, os.path.join(self.home, "root")):
            os.mkdir(folder, 0o711)

    def with_gpu(self) -> Jail | None:
        """Another one beside it, in which the GPU's devices are; its room must let Triton load what it compiles."""
        devices = gpu_devices()
        if not devices or os.statvfs(self.home).f_flag & os.ST_NOEXEC:
            return None
        jail = replace(self, home=os.path.join(self.home, "gpu"), devices=devices)
        os.mkdir(jail.home, 0o711)
        jail.make()
        return jail

    def admit(self, folder: str) -> None:
        os.umask(0)  # of the grader's process: the files it makes in there are the sandbox's to write, too
        if os.geteuid() == 0 and self.way == "namespaces":
            os.chown(folder, self.user, self.user)

    def around(self, command: list[str]) -> list[str]:
        """The command that runs a command of Python's inside."""
        entry = "sublight.learn.board.inside"
        inner = [*command[: command.index("-m")], "-m", entry, *command[command.index("-m") + 1 :]]
        if self.way == "bubblewrap":
            return [*self._bubblewrap(), *inner]
        plan = {
            "root": os.path.join(self.home, "root"),
            "shown": shown(),
            "hidden": [str(path) for path in HIDDEN],
            "room": self.room,
            "devices": self.devices,
            "user": self.user,
            "maker": os.getpid(),
        }
        return [sys.executable, "-P", "-m", "sublight.learn.board.outside", json.dumps(plan), *inner]

    def _bubblewrap(self) -> list[str]:
        words = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
        words += ["--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"]
        words += ["--proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]
        for path in shown():
            words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
        for hidden in HIDDEN:
            words += ["--tmpfs", str(hidden), "--remount-ro", str(hidden)]
        for device in self.devices:
            words += ["--dev-bind", device, device]
        words += ["--bind", self.room, self.room, "--remount-ro", "/dev", "--remount-ro", "/"]
        return [*words, "--chdir", "/"]


def shown() -> list[str]:
    """What is there inside: the system's programs and libraries, Python, and what it imports."""
    python = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *_installed(), str(PACKAGE)]
    wanted = [*_SYSTEM, *(os.path.realpath(path) for path in python), sys.prefix]
    there = [path for path in dict.fromkeys(wanted) if os.path.exists(path)]
    return [path for path in there if not any(_holds(other, path) for other in there if other != path)]


def _installed() -> list[str]:
    """Folders of packages outside of Python's own, as one environment may name another's in a .pth file: those that
    hold what the grader loads. A folder of any other name could hold the user's own files, and is not shown."""
    found = (importlib.util.find_spec(name) for name in ("torch", "triton", "numpy"))
    folders = [Path(spec.origin).parents[1] for spec in found if spec is not None and spec.origin]
    return [str(folder) for folder in folders if folder.name in ("site-packages", "dist-packages")]


def gpu_devices() -> tuple[str, ...]:
    """What CUDA opens; empty where there is none. Not those that make parts of a GPU or switch its modes."""
    names = sorted(os.listdir("/dev"))
    numbered = [name for name in names if name.removeprefix("nvidia").isdecimal()]
    wanted = [*numbered, "nvidiactl", "nvidia-uvm"]
    return tuple(f"/dev/{name}" for name in wanted if name in names) if numbered else ()


def _holds(folder: str, path: str) -> bool:
    return not os.path.islink(folder) and Path(path).is_relative_to(folder)


def is_shown(path: Path) -> bool:
    """Whether code inside could read this."""
    return any(path.resolve().is_relative_to(os.path.realpath(folder)) for folder in shown())


def user_of(slot: int) -> int:
    """A user for each of the sandboxes that run at the same time."""
    return FIRST_USER + slot % USERS if os.geteuid() == 0 else os.geteuid()


def environment() -> dict[str, str]:
    """The environment of the grader and what it starts: none of the server's own variables, which may hold secrets."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
    return {**kept, "HOME": "/tmp", "USER": "sandbox", "LOGNAME": "sandbox", "PYTHONPATH": str(PACKAGE.parent),
            "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip


def usable(home: Path, wanted: str = "") -> tuple[Way | None, str]:
    """The way that works here, tried; None and the reasons where none does."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None, "sandboxes are made on Linux, x86_64 or aarch64, alone"
    if wanted:
        order = [way for way in WAYS if way == wanted]
    else:
        order = list(WAYS) if os.geteuid() else ["namespaces", "bubblewrap"]
    reasons = []
    for way in order:
        if way == "bubblewrap" and not shutil.which("bwrap"):
            reasons.append("bubblewrap is not installed")
        elif reason := _trouble(Jail(way=way, home=str(home / f"trial-{way}"), user=user_of(USERS - 1))):
            reasons.append(f"{way}: {reason}")
        else:
            return way, ""
    return None, "; ".join(reasons)


def _trouble(jail: Jail) -> str:
    """Why a trial does not show what it should: only what is there, no network, nothing to write but the room."""
    os.mkdir(jail.home, 0o711)
    try:
        jail.make()
        mark = os.path.join(jail.home, "outside")
        Path(mark).write_text("")
        jail.admit(jail.room)
        command = [sys.executable, "-P", "-m", "sublight.learn.board.trial", jail.room, mark, str(ANSWERS)]
        done = subprocess.run(jail.around(command), env=environment(), capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=TRIAL_S)  # fmt: skip
        answer = done.stdout.strip() or (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        return "" if answer == "confined" else answer
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        shutil.rmtree(jail.home, ignore_errors=True)
