"""Takes entries that wait, one after the other, and has them graded, under watch, in processes of their own.

A grader that dies, hangs, or whose sandbox takes too much is ended with everything inside; its entry is rejected with
that reason, and the next one gets a new grader. No submission stops the server, and none is left without an outcome.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sublight.errors import BadInput
from sublight.learn.board import jail, processes
from sublight.learn.board.jail import Jail, Way
from sublight.learn.board.store import Entry, State, Store
from sublight.learn.grade.sandbox import Budget

GRADER = "sublight.learn.board.grader"
ABOVE_LIMIT = 1.02  # as the grader has it
LOOK_S, IDLE_S = 0.1, 0.5  # between two looks at a grader, at the queue
READY_S = 600.0  # for torch and Triton to load
ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What one submission may use: `budget` in one process, the rest for everything in the sandbox together."""

    budget: Budget = field(default_factory=lambda: Budget(cpu_s=10.0, wall_s=60.0, memory_bytes=2**30))
    wall_s: float = 240.0
    memory_bytes: int = 3 * 2**30  # what stands ready has a tenth of it
    scratch_bytes: int = 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    state: State
    fraction: float | None = None
    reason: str = ""
    verdict: dict[str, Any] = field(default_factory=dict)


class Broken(Exception):
    """The grader is gone, or was ended; the message says why."""


class Stopped(Exception):
    """The server ends while an entry is graded."""


class Grader:
    """One grader's process, with its sandbox."""

    def __init__(self, way: Way, slot: int, home: Path, rules: Rules, stop: threading.Event) -> None:
        self.rules, self.stop = rules, stop
        self.home = Path(tempfile.mkdtemp(prefix=f"grader-{slot}-", dir=home))
        self.home.chmod(0o711)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", GRADER],
            env=jail.environment(),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        sandbox = Jail(way=way, home=str(self.home), user=jail.user_of(slot))
        self._buffer = b""
        self._send({"jail": asdict(sandbox)})
        self.not_timed = ""  # why nothing is timed on a GPU here
        try:
            answer = self._answer(READY_S)
            missing, self.not_timed = answer["ready"], str(answer["not_timed"])
        except KeyError as error:
            self.close()
            raise Broken(f"the grader is of another version: its first answer has no {error}") from None
        except (Broken, Stopped):
            self.close()
            raise
        if missing:
            self.close()
            raise Broken(missing)

    def grade(self, entry: Entry) -> Outcome:
        order = {"exercise": entry.exercise, "source": entry.source, "gpu": entry.gpu}
        self._send({**order, "budget": asdict(self.rules.budget)})
        answer = self._answer(self.rules.wall_s)
        if "failure" in answer:
            return Outcome(state="rejected", reason=str(answer["failure"])[:500])
        return outcome_of(answer["verdict"], self.not_timed or "the server's GPU is another one")

    def _send(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise Broken("the grader ended") from None

    def _answer(self, most_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        end_s = time.monotonic() + most_s
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._buffer:
            if self.stop.is_set():
                raise Stopped
            if select.select([descriptor], [], [], LOOK_S)[0]:
                piece = os.read(descriptor, 1 << 16)
                if not piece:
                    raise Broken(f"it ended the grader (status {self.process.wait()}): it must not touch its files")
                self._buffer += piece
                if len(self._buffer) > ANSWER_BYTES:
                    raise Broken("its verdict does not end")
                continue
            if time.monotonic() > end_s:
                raise Broken(f"it took more than {most_s:g} s in all")
            self._look()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))

    def _look(self) -> None:
        """At the memory and the files of everything in the sandbox."""
        inside = sum(map(processes.memory_bytes, processes.below(self.process.pid)))
        if inside > self.rules.memory_bytes:
            raise Broken(f"it took more than {self.rules.memory_bytes >> 20} MiB of memory in all")
        if processes.folder_bytes(str(self.home)) > self.rules.scratch_bytes:
            raise Broken(f"it wrote more than {self.rules.scratch_bytes >> 20} MiB of files")

    def close(self) -> None:
        """At once: whatever is in the sandbox ends with the process that made it."""
        inside = processes.below(self.process.pid)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                stream and stream.close()
        end_s = time.monotonic() + 10
        while any(os.path.exists(f"/proc/{each}") for each in inside) and time.monotonic() < end_s:
            time.sleep(0.01)  # files of a process that is ending must not come back after the folder is gone
        shutil.rmtree(self.home, ignore_errors=True)


def outcome_of(verdict: dict[str, Any], not_timed: str = "") -> Outcome:
    """What the board makes of the grader's verdict; a figure that cannot be is not ranked. `not_timed`: why there is no
    time on a GPU, where there is none."""
    fraction = verdict["fraction_predicted"]
    shown = {name: verdict[name] for name in ("faults", "cases", "kernels", "notes", "gpu", "goal")}
    shown["timed"] = _timed(verdict.get("timed"))
    shown["not_timed"] = "" if shown["timed"] else not_timed
    if not verdict["passed"]:
        first = next(iter(verdict["faults"]), {"text": "it did not pass"})
        reason = f"line {first['line']}: {first['text']}" if first.get("line") else first["text"]
        return Outcome(state="rejected", fraction=None, reason=reason[:500], verdict=shown)
    if not isinstance(fraction, float) or not math.isfinite(fraction) or not 0 < fraction <= ABOVE_LIMIT:
        return Outcome(state="rejected", reason=f"a fraction of {fraction} cannot be", verdict=shown)
    return Outcome(state="verified", fraction=fraction, verdict=shown)


def _timed(timing: dict[str, Any] | None) -> dict[str, Any] | None:
    """The grader's own time on this machine's GPU, if it can be one."""
    if not timing or not 0 < timing["fraction"] <= ABOVE_LIMIT:
        return None
    return {name: timing[name] for name in ("seconds", "fraction", "case")}


class Runner:
    """The graders, each with a thread that feeds it."""

    def __init__(self, store: Store, way: Way, home: Path, *, graders: int, rules: Rules | None = None) -> None:
        self.store, self.way, self.home, self.rules = store, way, home, rules or Rules()
        self._stop = threading.Event()
        self.problem = ""  # why nothing is graded, where that is so
        self._threads = [threading.Thread(target=self._feed, args=(slot,), daemon=True) for slot in range(graders)]

    def start(self) -> None:
        self.store.recover()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _feed(self, slot: int) -> None:
        grader: Grader | None = None
        try:
            while not self._stop.is_set():
                entry = self._taken()
                if entry is None:
                    self._stop.wait(IDLE_S)
                    continue
                try:
                    outcome, grader = self._graded(entry, grader, slot)
                except Stopped:
                    with contextlib.suppress(BadInput):  # else the next start puts it back
                        self.store.put_back(entry.id)
                    return
                self._keep(entry, outcome)
        finally:
            if grader is not None:
                grader.close()

    def _taken(self) -> Entry | None:
        """The next entry; none where the database cannot be reached, which may be over soon."""
        try:
            return self.store.take()
        except BadInput as error:
            self.problem = str(error)
            return None

    def _keep(self, entry: Entry, outcome: Outcome) -> None:
        """Until the database takes it, or the server ends: then the entry is run again."""
        while True:
            try:
                return self.store.finish(entry.id, outcome.state, fraction=outcome.fraction, reason=outcome.reason,
                                         verdict=outcome.verdict)  # fmt: skip
            except BadInput as error:
                self.problem = str(error)
                if self._stop.wait(IDLE_S):
                    return None

    def _graded(self, entry: Entry, grader: Grader | None, slot: int) -> tuple[Outcome, Grader | None]:
        """The outcome, and the grader for the next one, if it is still good."""
        if grader is None:
            try:
                grader = Grader(self.way, slot, self.home, self.rules, self._stop)
                self.problem = ""
            except (Broken, OSError) as error:
                self.problem = str(error)
                return Outcome(state="not_rerun", reason=f"the server could not run it: {error}"), None
        try:
            return grader.grade(entry), grader
        except Stopped:
            grader.close()
            raise
        except Broken as broken:
            grader.close()
            return Outcome(state="rejected", reason=str(broken)), None
        except Exception as error:
            grader.close()
            return Outcome(state="rejected", reason=f"the grader failed ({type(error).__name__})"), None
