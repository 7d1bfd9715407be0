"""Processes by Linux's /proc: who was started by whom, and how much memory they have."""

from __future__ import annotations

import os
from pathlib import Path


def below(process: int) -> list[int]:
    """All that a process started, and what these started. Whoever loses a parent in a sandbox stays in it."""
    return list(_below(process))


def awake(process: int) -> int:
    """How many of them are neither dead nor stopped."""
    return sum(state[:1] in "RSDI" for state in _below(process).values())


def _below(process: int) -> dict[int, str]:
    """The processes below this one, with their states, such as `S (sleeping)`."""
    children: dict[int, dict[int, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _fields(int(name))):
            children.setdefault(int(fields.get("PPid", "0")), {})[int(name)] = fields.get("State", "")
    found: dict[int, str] = {}
    ahead = [process]
    while ahead:
        mine = children.get(ahead.pop(), {})
        found |= mine
        ahead += mine
    return found


def memory_bytes(process: int) -> int:
    """A process's memory, its own and shared; pages of files do not count, since the system may drop them."""
    fields = _fields(process)
    return sum(int(fields.get(name, "0 kB").split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def folder_bytes(folder: str) -> int:
    """The bytes of all files below a folder, without following links."""
    total = 0
    for base, _, names in os.walk(folder, onerror=None):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _fields(process: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
