"""Makes a sandbox of Linux's namespaces and runs a command in it: `python -m … .outside PLAN COMMAND`.

What bubblewrap does, where it is not installed: a root of its own in memory, into which what the plan shows is bound
read-only, new processes' numbers, no network, no privileges. Started by root, the command runs as the plan's user. It
ends when whoever started it does, and with it everything inside.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import select
import signal
import socket
import sys
from typing import Any

from sublight.learn.board.jail import DEVICES, NOBODY

_NEW_MOUNTS, _NEW_CGROUP, _NEW_HOST, _NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_PROGRAMS, _REMOUNT, _BIND, _ALL_BELOW, _PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18
)  # fmt: skip
_SAFE = _NO_SUID | _NO_DEVICES
_DETACH, _PARENT_DIES, _NO_NEW_PRIVILEGES = 2, 1, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SET_ATTRIBUTES, _RECURSIVE, _HERE = 442, 0x8000, -100
_libc = ctypes.CDLL(None, use_errno=True)


def main(plan: dict[str, Any], command: list[str]) -> int:
    _end_with_parent()
    if os.getppid() != plan["maker"]:  # it ended before it could be watched
        return 1
    user = os.geteuid()
    alive, held = os.pipe()  # what this process holds open as long as it lives
    spaces = _NEW_MOUNTS | _NEW_PIDS | _NEW_NETWORK | _NEW_IPC | _NEW_HOST | _NEW_CGROUP
    if user == 0:
        _call("unshare", spaces)
    else:
        group = os.getegid()
        _call("unshare", spaces | _NEW_USER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{NOBODY} {user} 1")
        _write("/proc/self/gid_map", f"{NOBODY} {group} 1")
    child = os.fork()
    if child:  # whoever has made the processes' new numbers is not counted by them: the child is number 1
        os.close(alive)
        _, status = os.waitpid(child, 0)
        return max(0, os.waitstatus_to_exitcode(status))
    os.close(held)
    _enter(plan)
    if user == 0:
        os.setgroups([])
        os.setresgid(*[plan["user"]] * 3)
        os.setresuid(*[plan["user"]] * 3)
    _end_with_parent()  # a change of user undoes it
    if select.select([alive], [], [], 0)[0]:
        os._exit(1)
    os.close(alive)
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    os.chdir("/")
    os.execv(command[0], command)


def _enter(plan: dict[str, Any]) -> None:
    """Build the root and go there; what was before is gone."""
    root = plan["root"]
    _mount("none", "/", "", _ALL_BELOW | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _SAFE, "mode=755,size=1m")
    for path in plan["shown"]:
        if os.path.islink(path):
            os.makedirs(root + os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
        else:
            _bind(path, root + path, _READ_ONLY | _SAFE)
    for path in plan["hidden"]:
        if os.path.isdir(root + path):
            _mount("tmpfs", root + path, "tmpfs", _SAFE | _READ_ONLY, "mode=755,size=4k")
    for folder in ("/proc", "/dev", "/tmp"):
        os.makedirs(root + folder, exist_ok=True)
    _mount("proc", root + "/proc", "proc", _SAFE | _NO_PROGRAMS)
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}", _NO_SUID | _NO_PROGRAMS)
    for device in plan["devices"]:
        _bind(device, root + device, _NO_SUID | _NO_PROGRAMS)
    _bind(plan["room"], root + plan["room"], _SAFE | (0 if plan["devices"] else _NO_PROGRAMS))
    _mount("", root, "", _REMOUNT | _BIND | _READ_ONLY | _SAFE)
    os.chdir(root)
    _checked(_libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _call("umount2", b".", _DETACH)
    socket.sethostname("sandbox")


def _bind(source: str, target: str, flags: int) -> None:
    """A file or a folder with all below it, under these restrictions."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT, 0o644))
    _mount(source, target, "", _BIND | _ALL_BELOW)
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)  # the flags to set have the same numbers
    _checked(
        _libc.syscall(_SET_ATTRIBUTES, _HERE, target.encode(), _RECURSIVE, attributes, ctypes.sizeof(attributes)),
        f"restricting {source}",
    )


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None)
    _checked(_libc.mount(*words), f"mounting {target}")


def _end_with_parent() -> None:
    _call("prctl", _PARENT_DIES, signal.SIGKILL, 0, 0, 0)


def _call(name: str, *args: Any) -> None:
    _checked(getattr(_libc, name)(*args), name)


def _checked(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise SystemExit(f"{what}: {os.strerror(code)}")


def _write(path: str, words: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(words)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
