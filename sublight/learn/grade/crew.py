"""The grader's side of the processes that run submissions: orders, answers, and an end to what takes too long."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from sublight.errors import BadInput
from sublight.gpus import Gpu, detect
from sublight.learn.grade.sandbox import Budget

Mode = Literal["interpret", "compile", "launch", "play"]
ANSWER_BYTES = 1 << 24
READY_S = 300.0  # for torch and Triton to load, on a machine that is busy
_DEATHS = {
    signal.SIGXCPU: "it took more than {cpu_s:g} s of processor time: does a loop never end, or go element by element?",
    signal.SIGKILL: "it was killed: it took too much memory, or too long",
    signal.SIGSEGV: "it crashed (SIGSEGV): it may have reached memory that is not its own, or used too much of it",
}


_ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # no threads
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

_FLAGS = ("-P", "-W", "ignore::DeprecationWarning")  # modules of the learner's folder are not ours; forks are meant


class Sandbox(Protocol):
    """What a server puts around the processes: a file system, a network and a user of their own."""

    @property
    def room(self) -> str:
        """A folder that they and the grader see."""

    def around(self, command: list[str]) -> list[str]: ...

    def admit(self, folder: str) -> None:
        """Let them write to a folder in the room."""

    def with_gpu(self) -> Sandbox | None:
        """Another like it, in which this machine's GPU is; None where it cannot be given."""


class CrewGone(BadInput):
    """The processes that stand ready are gone: something ended them, as a machine that is short of memory does."""


class Ended(Exception):
    """The process that ran a submission is gone; the message says why."""


@dataclass(slots=True, kw_only=True)
class Task:
    """One forked process with one submission."""

    crew: Crew
    mode: Mode
    child: int
    channel: Connection
    budget: Budget
    cpu_s: float = 0.0

    def answer(self) -> dict[str, Any]:
        """The next answer; a process that takes too long, or ends, is an `Ended`."""
        if not self.channel.poll(self.budget.wall_s):
            self.end()
            raise Ended(f"nothing came back for {self.budget.wall_s:g} s: does it wait for something?")
        try:
            reply = json.loads(self.channel.recv_bytes(ANSWER_BYTES))
            self.cpu_s += float(reply["cpu_s"])
            return dict(reply)
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError):  # gone, or no answer of ours
            raise Ended(self._death()) from None

    def ask(self, **order: Any) -> dict[str, Any]:
        try:
            self.channel.send_bytes(json.dumps(order).encode())
        except OSError:
            raise Ended(self._death()) from None
        return self.answer()

    def _death(self) -> str:
        self.channel.close()
        status = self.crew.request(self.mode, {"wait": self.child, "end": True})  # it may live, and have hung up
        self.child = 0
        if status >= 0:
            return "its process ended before the function had returned"
        known = _DEATHS.get(signal.Signals(-status), "its process was killed by signal {signal}")
        return known.format(cpu_s=self.budget.cpu_s, signal=-status)

    def kill(self) -> None:
        """From another thread than the one that waits for its answer, which then hears that it is gone."""
        if child := self.child:
            self.crew.request(self.mode, {"kill": child})

    def end(self) -> None:
        """Whatever it does, and whatever it started."""
        self.channel.close()
        if self.child:
            self.crew.request(self.mode, {"wait": self.child, "end": True})
            self.child = 0


class Crew:
    """The processes that stand ready, one for each mode. They load torch while the grader does."""

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        modes: tuple[Mode, ...] = ("interpret", "compile"),
        *,
        has_gpu: bool = False,
    ) -> None:
        self.sandbox, self._has_gpu = sandbox, has_gpu
        self._timer: Crew | None = None
        self._asking = threading.Lock()  # several submissions may begin at the same time
        if sys.platform != "linux":
            raise BadInput("checks run on Linux alone, as Triton does: use a Linux machine, a container or WSL")
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in modes]
        self._ends: dict[Mode, socket.socket] = {mode: pair[0] for mode, pair in zip(modes, pairs, strict=True)}
        root = str(Path(__file__).resolve().parents[3])
        kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        theirs = [pair[1].fileno() for pair in pairs]
        ends = [f"{mode}={end}" for mode, end in zip(modes, theirs, strict=True)]
        command = [sys.executable, *_FLAGS, "-m", "sublight.learn.grade.worker", *ends]
        self._process = subprocess.Popen(
            sandbox.around(command) if sandbox else command,
            env={**kept, "PYTHONPATH": path, **_ALONE, **({} if has_gpu else _NO_GPU)},
            start_new_session=True,  # Ctrl-C is the grader's to hear
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for pair in pairs:
            pair[1].close()

    def request(self, mode: Mode, order: dict[str, Any], *descriptors: int) -> int:
        """A number: the child's id, or the status with which it ended."""
        end = self._ends[mode]
        end.settimeout(READY_S)
        try:
            with self._asking:
                socket.send_fds(end, [json.dumps(order).encode()], list(descriptors))
                reply = end.recv(1 << 12)
        except OSError:
            reply = b""
        if not reply:
            raise CrewGone("the process that runs submissions ended: `sublight doctor` says whether Triton works here")
        return int(json.loads(reply))

    @contextlib.contextmanager
    def folder(self) -> Iterator[str]:
        """A folder of one check, in memory where that can be: not where libraries are loaded from, since containers
        often forbid that of /dev/shm."""
        is_in_memory = not self._has_gpu and os.access("/dev/shm", os.W_OK)
        room = self.sandbox.room if self.sandbox else "/dev/shm" if is_in_memory else None
        with tempfile.TemporaryDirectory(prefix="sublight-learn-", dir=room) as name:
            if self.sandbox:
                self.sandbox.admit(name)
            yield name

    def timer(self, gpu: Gpu) -> Crew | None:
        """The crew that launches on this machine's GPU, if it is that one, in a sandbox like this crew's; none with
        SUBLIGHT_LEARN_TIME=0, nor where the sandbox cannot have a GPU."""
        here = detect() if os.environ.get("SUBLIGHT_LEARN_TIME") != "0" else None
        if here is None or here.key != gpu.key or not here.compute_capability:
            return None
        if self._timer is None:
            sandbox = self.sandbox.with_gpu() if self.sandbox else None
            if self.sandbox and sandbox is None:
                return None
            self._timer = Crew(sandbox, modes=("launch",), has_gpu=True)
        return self._timer

    @property
    def rooms(self) -> list[str]:
        """The folders of all its sandboxes."""
        crews = [self, *([self._timer] if self._timer else [])]
        return [crew.sandbox.room for crew in crews if crew.sandbox]

    def begin(self, mode: Mode, order: dict[str, Any], budget: Budget, *descriptors: int) -> Task:
        """A process that has loaded the submission, or has failed to: its first answer says. It gets copies of these
        descriptors, whose numbers there its order names."""
        ours, theirs = socket.socketpair()
        words = {**order, "budget": dataclasses.asdict(budget)}
        try:
            child = self.request(mode, words, theirs.fileno(), *descriptors)
        finally:
            theirs.close()
        return Task(crew=self, mode=mode, child=child, channel=Connection(ours.detach()), budget=budget)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()
        for end in self._ends.values():
            end.close()
        self._process.terminate()  # the other one, which it forked, hears that the grader hung up
        self._process.wait()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
