"""One of several processes is timed at a time, and the others stand still meanwhile.

The process that starts the others holds a `Referee`. A process that wants its steps timed calls `begin()`: when its
turn has come, every other process that the referee's process has started is stopped by SIGSTOP, and `begin` returns.
`end()`, or the end of the process, lets them go on. What a process does before and after (load PyTorch, compile, warm
up) runs beside the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from types import TracebackType

ADDRESS = "SUBLIGHT_ALONE_SOCKET"
MOST_S = 40.0  # the longest turn: after it the others go on, whatever its process does
DRAIN_S = 0.05  # a wait for the kernels that stopped processes had launched
_held: list[socket.socket] = []


def begin() -> None:
    """Wait for a turn; nothing where there is no referee, or where this process has its turn."""
    if (name := os.environ.get(ADDRESS)) and not _held:
        line = socket.socket(socket.AF_UNIX)
        line.connect("\0" + name)  # an abstract socket, no file: a trial may not write where this script's files are
        line.sendall(str(os.getpid()).encode())
        line.recv(1)
        _held.append(line)


def end() -> None:
    while _held:
        with contextlib.suppress(OSError), _held.pop() as line:
            line.sendall(b"0")  # closing alone is not enough: workers forked meanwhile hold the socket, too


class Referee:
    """Gives turns while its `with` block runs, one after the other."""

    def __init__(self) -> None:
        self.turns_s: list[float] = []
        self._name = f"sublight-alone-{os.getpid()}-{time.monotonic_ns()}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._line: socket.socket | None = None  # the connection to the process whose turn it is
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Referee:
        self._socket.bind("\0" + self._name)
        self._socket.listen(64)
        self._thread.start()
        os.environ[ADDRESS] = self._name  # inherited by processes that start from here on
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.environ.pop(ADDRESS, None)
        for each in (self._socket, self._line):  # closing them wakes accept() and ends the turn
            with contextlib.suppress(OSError, AttributeError):
                each.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:  # closed: no more turns
                return
            self._line = line
            with line, contextlib.suppress(OSError):
                line.settimeout(MOST_S)
                self._turn(int(line.recv(32) or b"0"), line)

    def _turn(self, pid: int, line: socket.socket) -> None:
        if not pid:
            return
        began_s, stopped = time.monotonic(), set[int]()
        try:
            while others := _others(pid) - stopped:  # again, since one may have started a child before it was stopped
                for other in others:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, signal.SIGSTOP)
                stopped |= others
            time.sleep(DRAIN_S)
            line.sendall(b"1")
            line.recv(1)  # returns when the process ends its turn, or is gone
        finally:
            for other in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGCONT)
            self.turns_s.append(time.monotonic() - began_s)


def _others(pid: int) -> set[int]:
    """The processes that this one has started, at any remove, without `pid`, its ancestors and what it has started."""
    parents = dict(filter(None, map(_parent, filter(str.isdigit, os.listdir("/proc")))))

    def line_of(one: int) -> list[int]:
        line = [one]
        while line[-1] in parents and parents[line[-1]]:
            line.append(parents[line[-1]])
        return line

    root, kept = os.getpid(), set(line_of(pid))
    return {one for one in parents if one not in kept and root in (line := line_of(one)) and pid not in line} - {root}


def _parent(name: str) -> tuple[int, int] | None:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except OSError:  # it has ended
        return None
    return (int(name), int(after_name[1])) if after_name[0] not in (b"Z", b"X") else None
