"""What a process is: its command line and its container, from /proc."""

from __future__ import annotations

import re
from pathlib import Path

from sublight.health.record import Unavailable, Words

PROC = Path("/proc")
ELSEWHERE = Unavailable("in another container, or gone")  # NVML counts processes as the host does
_CONTAINERS = (  # what stands in a line of /proc/PID/cgroup -> what a person calls it
    (re.compile(r"(docker|crio|cri-containerd|libpod)-([0-9a-f]{12})[0-9a-f]*\.scope"), "{0} {1}"),
    (re.compile(r"/(docker|libpod)[/-]([0-9a-f]{12})[0-9a-f]*"), "{0} {1}"),
    (re.compile(r"/(kubepods)\S*/([0-9a-f]{12})[0-9a-f]{52}"), "{0} {1}"),
    (re.compile(r"/(?:lxc|lxc\.payload)[/.]([\w.-]+)"), "lxc {0}"),
    (re.compile(r"/(?:slurm\S*/)?job_(\d+)"), "slurm job {0}"),
)


def command(pid: int) -> Words:
    """A process's command line, or its name where it has none."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words or (PROC / str(pid) / "comm").read_text().strip()
    except PermissionError:
        return Unavailable("belongs to another user")
    except OSError:
        return ELSEWHERE


def container(pid: int) -> Words:
    """The kind and number of a process's container; empty where it runs in none."""
    try:
        return container_in((PROC / str(pid) / "cgroup").read_text())
    except PermissionError:
        return Unavailable("belongs to another user")
    except OSError:
        return ELSEWHERE


def container_in(cgroup: str) -> str:
    """
    >>> container_in("0::/system.slice/docker-4f1c2a9b8d7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a2b1c0d9e8f7a6b5c4d3e2f1a.scope")
    'docker 4f1c2a9b8d7e'
    >>> container_in("0::/user.slice/user-1000.slice/session-3.scope")
    ''
    """
    for pattern, words in _CONTAINERS:
        if match := pattern.search(cgroup):
            return words.format(*match.groups())
    return ""
