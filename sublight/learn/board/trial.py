"""Run in a new sandbox before the server trusts it: says `confined`, or what is not as it must be."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys


def trouble(room: str, outside: str, hidden: str) -> str:
    try:
        with open(os.path.join(room, "trial"), "w", encoding="ascii") as file:
            file.write("x")
    except OSError as error:
        return f"its own folder cannot be written: {error.strerror}"
    if os.path.exists(outside):
        return "files of the server are in sight"
    if os.path.isdir(hidden) and os.listdir(hidden):
        return "the exercises' solutions are in sight"
    for folder in ("/", "/tmp", "/dev", "/dev/shm", os.path.dirname(os.__file__)):
        if os.access(folder, os.W_OK):
            return f"{folder} can be written"
    if len([name for name in os.listdir("/proc") if name.isdecimal()]) > 4:
        return "other processes are in sight"
    if os.geteuid() == 0:
        return "it runs as root"
    if socket.if_nameindex() != [(1, "lo")]:
        return "there is a network"
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be loaded inside: install them where this Python's other packages are"
    try:
        os.close(os.open("/proc/self/mem", os.O_RDWR))
        return "processes read each other's memory"
    except OSError:
        pass
    return ""


if __name__ == "__main__":
    print(trouble(*sys.argv[1:]) or "confined")
