"""What a profiler gives: a process's looks or calls, its children's beside it; JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sublight.errors import BadInput, refuse_device
from sublight.sampling import UNKNOWN, Frame, Row, Samples

FORMAT = "sublight pyprof 1"
Mode = Literal["sample", "trace", "counts"]


class CallNode(NamedTuple):  # there are many: a tuple is made in a tenth of the time
    """A function as it was called from one place of the tree; node 0 is the root."""

    parent: int  # -1: the root
    function: int  # into Calls.functions; -1: the root
    calls: int
    resumes: int  # of a generator or coroutine that went on
    total_ns: int  # with what it called; 0 where only counts were wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadCalls:
    """A thread's tree: a node's parent comes before it."""

    name: str
    nodes: tuple[CallNode, ...]
    lost: int = 0  # ends of calls that did not fit what was open


class CallEvent(NamedTuple):
    """One call."""

    thread: int
    node: int
    start_ns: int  # since the trace began
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What a tracer counted."""

    functions: tuple[Frame, ...] = ()  # `line` is where it begins; a builtin has no file
    threads: tuple[ThreadCalls, ...] = ()
    events: tuple[CallEvent, ...] = ()  # the first so many, by their ends
    wall_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonProcess:
    """One process."""

    pid: int
    parent: int = 0
    command: str = ""
    samples: Samples | None = None
    calls: Calls | None = None
    looks: int = 0
    how: str = ""  # in C, or in Python and why
    knows_waits: bool = False  # whether looks tell who waited for the interpreter's lock, and for a core


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonProfile:
    """The run of a program."""

    mode: Mode
    command: str
    python: str = ""
    hz: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0  # of the first process
    exit_code: int = 0
    processes: tuple[PythonProcess, ...] = ()  # the program itself is the first
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in ("mode", "command", "python", "hz", "wall_s", "cpu_s")}
        processes = [process_to_json(process) for process in self.processes]
        return {
            "format": FORMAT,
            **data,
            "exit_code": self.exit_code,
            "notes": list(self.notes),
            "processes": processes,
        }

    @classmethod
    def from_json(cls, data: Any) -> PythonProfile:
        """ValueError where it is no such thing."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ValueError("this is no profile of `sublight pyprof --json`")
        try:
            mode = data["mode"]
            if mode not in ("sample", "trace", "counts"):
                raise ValueError(f"unknown mode {mode!r}")
            return cls(
                mode=mode,
                command=str(data["command"]),
                python=str(data["python"]),
                hz=float(data["hz"]),
                wall_s=float(data["wall_s"]),
                cpu_s=float(data["cpu_s"]),
                exit_code=int(data["exit_code"]),
                notes=tuple(str(note) for note in data["notes"]),
                processes=tuple(process_from_json(one) for one in data["processes"]),
            )
        except (KeyError, TypeError, AttributeError, OverflowError, IndexError) as error:
            raise ValueError(f"this profile is damaged: {type(error).__name__} {error}") from None


def read(path: str) -> PythonProfile:
    """A profile that --json wrote; one line where it cannot be read."""
    refuse_device(path)
    try:
        return PythonProfile.from_json(json.loads(Path(path).read_bytes()))
    except FileNotFoundError:
        raise BadInput(f"no such file: {path}") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = str(error) if "this" in str(error) else "it is not JSON"
        raise BadInput(f"{path}: {reason}; write one with `sublight pyprof script.py --json FILE`") from None


def process_to_json(process: PythonProcess) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "parent": process.parent,
        "command": process.command,
        "how": process.how,
        "looks": process.looks,
        "knows_waits": process.knows_waits,
        "samples": process.samples.to_json() if process.samples else None,
        "calls": _calls_to_json(process.calls) if process.calls else None,
    }


def process_from_json(data: Mapping[str, Any]) -> PythonProcess:
    return PythonProcess(
        pid=int(data["pid"]),
        parent=int(data["parent"]),
        command=str(data["command"]),
        how=str(data["how"]),
        looks=int(data["looks"]),
        knows_waits=bool(data["knows_waits"]),
        samples=Samples.from_json(data["samples"]) if data["samples"] else None,
        calls=_calls_from_json(data["calls"]) if data["calls"] else None,
    )


def _calls_to_json(calls: Calls) -> dict[str, Any]:
    return {
        "functions": [[one.file, one.function, one.line] for one in calls.functions],
        "threads": [
            {
                "name": thread.name,
                "lost": thread.lost,
                "nodes": [list(node) for node in thread.nodes],
            }
            for thread in calls.threads
        ],
        "events": [list(event) for event in calls.events],
        "wall_ns": calls.wall_ns,
    }


def _calls_from_json(data: Mapping[str, Any]) -> Calls:
    functions = tuple(Frame(str(file), str(name), int(line), int(line)) for file, name, line in data["functions"])
    threads = []
    for one in data["threads"]:
        nodes = tuple(CallNode(*(int(number) for number in node)) for node in one["nodes"])
        for at, node in enumerate(nodes):
            if not (-1 <= node.parent < at or at == 0) or not -1 <= node.function < len(functions):
                raise ValueError("this profile is damaged: a number points outside")
        threads.append(ThreadCalls(name=str(one["name"]), nodes=nodes, lost=int(one["lost"])))
    events = tuple(CallEvent(*(int(number) for number in event)) for event in data["events"])
    for event in events:
        if not 0 <= event.thread < len(threads) or not 0 <= event.node < len(threads[event.thread].nodes):
            raise ValueError("this profile is damaged: a number points outside")
    return Calls(functions=functions, threads=tuple(threads), events=events, wall_ns=int(data["wall_ns"]))


def merged(samples: Samples) -> Samples:
    """Looks that saw the same as the one before, of the same thread, as one: shorter to keep, the same to draw."""
    last: dict[int, int] = {}
    rows: list[Row] = []
    for row in samples.rows:
        at = last.get(row.thread)
        before = rows[at] if at is not None else None
        ends = before is not None and before.time_ns + 2 * row.wall_ns >= row.time_ns
        if at is not None and before is not None and ends and _kind(before) == _kind(row):
            rows[at] = replace(
                row,
                wall_ns=before.wall_ns + row.wall_ns,
                cpu_ns=before.cpu_ns + row.cpu_ns if row.cpu_ns != UNKNOWN else UNKNOWN,
                gil_ns=before.gil_ns + row.gil_ns if row.gil_ns != UNKNOWN else UNKNOWN,
                core_ns=before.core_ns + row.core_ns if row.core_ns != UNKNOWN else UNKNOWN,
            )
        else:
            last[row.thread] = len(rows)
            rows.append(row)
    return replace(samples, rows=tuple(rows))


def _kind(row: Row) -> tuple[Any, ...]:
    return (row.stack, row.label, row.cpu_ns == UNKNOWN, row.gil_ns == UNKNOWN, row.core_ns == UNKNOWN)
