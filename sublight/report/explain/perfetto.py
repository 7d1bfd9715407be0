"""The whole trace for ui.perfetto.dev: every event again, and the findings as a track of their own.

Chrome's JSON, in the words of PyTorch's profiler (categories, argument names), so that what reads those reads this.
"""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sublight.diagnose.record import Explanation
from sublight.errors import BadInput
from sublight.report.explain.timeline import lane_text, window_ns
from sublight.results import writing
from sublight.trace.record import EMPTY, NONE, ON_DEVICE, Detail, Ints, Kind, Trace

CATEGORIES = {
    Kind.OP: "cpu_op",
    Kind.RUNTIME: "cuda_runtime",
    Kind.KERNEL: "kernel",
    Kind.MEMCPY: "gpu_memcpy",
    Kind.MEMSET: "gpu_memset",
    Kind.RANGE: "user_annotation",
    Kind.DEVICE_RANGE: "gpu_user_annotation",
    Kind.PYTHON: "python_function",
    Kind.OVERHEAD: "overhead",
    Kind.SYNC: "cuda_sync",
}
FINDINGS_PID = 1  # the lowest process id: Perfetto shows the findings on top
STEPS_TID, FINDINGS_TID = 1, 2
FIRST_PID = 2
CHUNK = 20_000  # events encoded at a time: a trace of a gigabyte is never whole in memory as text


def write(explanation: Explanation, path: Path) -> None:
    """Write the file, gzipped where its name ends in .gz."""
    if explanation.trace is None:
        raise BadInput(f"cannot write {path}: no trace was kept with this explanation")
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(writing(path))
        if path.suffix == ".gz":
            file = stack.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=5, mtime=0))
        for chunk in chunks(explanation, explanation.trace):
            file.write(chunk)


def chunks(explanation: Explanation, trace: Trace) -> Iterator[bytes]:
    """The file, piece by piece: metadata, then the events by time, our own among them."""
    encoder = msgspec.json.Encoder()
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": trace.base_ns,
        "deviceProperties": [
            {"id": device.index, "name": device.name, **({"numSms": device.sms} if device.sms else {})}
            for device in trace.devices
        ],
        **({"distributedInfo": {"rank": trace.rank, "world_size": trace.world_size}} if trace.rank is not None else {}),
    }
    yield encoder.encode(head)[:-1] + b',"traceEvents":['
    tracks = tracks_of(trace)
    track = _track(explanation)
    names = [*_names(trace, tracks), *(event for event in track if event["ph"] == "M")]
    yield encoder.encode(names)[1:-1]  # there is at least one name
    waiting = [event for event in track if event["ph"] != "M"]
    flows = _flows(trace)
    for begin in range(0, len(trace), CHUNK):
        events = _events(trace, tracks, flows, begin, begin + CHUNK)
        due = [event for event in waiting if event["ts"] <= events[-1]["ts"]]
        waiting = waiting[len(due) :]
        yield b",\n" + encoder.encode(sorted(events + due, key=lambda event: event["ts"]))[1:-1]
    if waiting:
        yield b",\n" + encoder.encode(waiting)[1:-1]
    yield b"]}\n"


def tracks_of(trace: Trace) -> Ints:
    """How many events of its lane each event overlaps without nesting: a track of Perfetto's only nests.

    >>> from sublight.report.explain import trace_fakes
    >>> int(tracks_of(trace_fakes.trace()).max())
    0
    """
    out = []
    open_ends: dict[int, list[list[int]]] = {}
    for lane, start, end in zip(trace.lane.tolist(), trace.start_ns.tolist(), trace.end_ns.tolist(), strict=True):
        levels = open_ends.setdefault(lane, [])
        for level, ends in enumerate(levels):  # noqa: B007  # the level is what we look for
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or ends[-1] >= end:
                break
        else:
            level, ends = len(levels), []
            levels.append(ends)
        ends.append(end)
        out.append(level)
    return np.array(out, dtype=np.int64)


def _pids(trace: Trace) -> list[int]:
    """A process id for each lane: threads' processes first, then devices."""
    keys = [(lane.kind == "stream", lane.process, lane.device) for lane in trace.lanes]
    order = {key: FIRST_PID + number for number, key in enumerate(sorted(set(keys)))}
    return [order[key] for key in keys]


def _tid(lane: int, track: int) -> int:
    """A thread id, unique over all processes; a lane's overlapping events get ids next to its own."""
    return 100 * (lane + 1) + min(track, 99)


def _named(what: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _names(trace: Trace, tracks: Ints) -> Iterator[dict[str, Any]]:
    yield _named("process_name", FINDINGS_PID, 0, name="sublight")
    yield _named("process_sort_index", FINDINGS_PID, 0, sort_index=-1)
    for tid, name in ((STEPS_TID, "steps"), (FINDINGS_TID, "sublight findings")):
        yield _named("thread_name", FINDINGS_PID, tid, name=name)
        yield _named("thread_sort_index", FINDINGS_PID, tid, sort_index=tid)
    pids = _pids(trace)
    for lane, pid in zip(trace.lanes, pids, strict=True):
        name = lane.process or (f"GPU {lane.device}" if lane.kind == "stream" else "process")
        yield _named("process_name", pid, 0, name=name)
        yield _named("process_sort_index", pid, 0, sort_index=pid)
    used = np.unique(np.stack((trace.lane.astype(np.int64), tracks)), axis=1).T.tolist()
    for at, track in used:
        name = lane_text(trace, at) + (f" ({track + 1})" if track else "")
        yield _named("thread_name", pids[at], _tid(at, track), name=name)
        yield _named("thread_sort_index", pids[at], _tid(at, track), sort_index=_tid(at, track))


def steps_ns(explanation: Explanation) -> list[tuple[int, int]]:
    """Where steps begin and end: as noted in `meta["steps_s"]`, as the profiler marked, or the one drawn."""
    if noted := explanation.meta.get("steps_s"):
        return [(round(1e9 * start), round(1e9 * end)) for start, end in noted]
    trace = explanation.trace
    if trace is not None:
        marked = trace.rows_named(lambda name: name.startswith("ProfilerStep"), Kind.RANGE)
        if len(marked):
            return list(zip(trace.start_ns[marked].tolist(), trace.end_ns[marked].tolist(), strict=True))
    return [window_ns(explanation)]


def _track(explanation: Explanation) -> list[dict[str, Any]]:
    """Steps as markers, findings as events; by time."""
    out: list[dict[str, Any]] = []
    for number, (start_ns, _) in enumerate(steps_ns(explanation), 1):
        common = {"pid": FINDINGS_PID, "tid": STEPS_TID, "cat": "sublight"}
        out.append({**common, "ph": "i", "s": "g", "name": f"step {number}", "ts": start_ns / 1000})
    for finding in explanation.findings:
        args = {
            "title": finding.title,
            "saving_ms": 1e3 * finding.saving_s,
            "evidence": "\n".join(finding.evidence),
            "fix": finding.fix,
        }
        for place in finding.places:
            event = {"ph": "X", "cat": "sublight", "pid": FINDINGS_PID, "tid": FINDINGS_TID, "name": finding.id}
            lasts_us = max(0.001, 1e6 * (place.end_s - place.start_s))
            more = {"place": place.label} if place.label else {}
            out.append(
                {**event, "ts": round(1e6 * place.start_s, 3), "dur": round(lasts_us, 3), "args": {**args, **more}}
            )
    # one track cannot show events that overlap: such findings go to tracks below it
    return _apart(sorted(out, key=lambda event: (event["ts"], -event.get("dur", 0))))


def _apart(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move events that overlap on the findings' track to further tracks of the same name."""
    free_at: list[float] = []
    out = []
    for event in events:
        if event["ph"] != "X":
            out.append(event)
            continue
        level = next((at for at, free in enumerate(free_at) if free <= event["ts"]), len(free_at))
        if level == len(free_at):
            free_at.append(0.0)
            if level:
                out.append(_named("thread_name", FINDINGS_PID, FINDINGS_TID + level, name="sublight findings"))
        free_at[level] = event["ts"] + event["dur"]
        out.append({**event, "tid": FINDINGS_TID + level})
    return sorted(out, key=lambda event: event["ph"] != "M")


def _flows(trace: Trace) -> set[int]:
    """An arrow for each correlation id that both a call and a device event carry."""
    calls = trace.correlation[trace.of_kind(Kind.RUNTIME)]
    return set(np.intersect1d(calls[calls != NONE], trace.correlation[trace.device_rows]).tolist())


def _events(trace: Trace, tracks: Ints, flows: set[int], begin: int, end: int) -> list[dict[str, Any]]:
    pids, names, details = _pids(trace), trace.names, trace.details
    arguments: dict[int, dict[str, Any]] = {}
    part = slice(begin, end)
    columns = (
        trace.kind, trace.name, trace.lane, trace.detail, trace.start_ns, trace.end_ns, tracks,
        trace.correlation, trace.external, trace.sequence, trace.bytes, trace.graph_node,
    )  # fmt: skip
    out: list[dict[str, Any]] = []
    for kind, name, lane, detail, start, stop, track, correlation, external, sequence, size, node in zip(
        *(column[part].tolist() for column in columns), strict=True
    ):
        args = arguments.get(detail)
        if args is None:
            args = arguments[detail] = detail_args(details[detail])
        own = {
            key: value
            for key, value in (
                ("correlation", correlation), ("External id", external), ("Sequence number", sequence), ("bytes", size),
                ("graph node id", node),
            )
            if value != NONE
        }  # fmt: skip
        if trace.lanes[lane].kind == "stream":
            own |= {"device": trace.lanes[lane].device, "stream": _number(trace.lanes[lane].number)}
        where = {"pid": pids[lane], "tid": _tid(lane, track), "ts": start / 1000}
        event = {"ph": "X", "cat": CATEGORIES[Kind(kind)], "name": names[name], **where}
        out.append({**event, "dur": (stop - start) / 1000, "args": {**args, **own}})
        if correlation in flows and (kind == Kind.RUNTIME or kind in ON_DEVICE):
            ends = {"ph": "s"} if kind == Kind.RUNTIME else {"ph": "f", "bp": "e"}
            out.append({**ends, "id": correlation, "cat": "ac2g", "name": "ac2g", **where})
    return out


def _number(words: str) -> int | str:
    return int(words) if words.isascii() and words.isdigit() else words


def detail_args(detail: Detail) -> dict[str, Any]:
    """What an event says, under the profiler's own names."""
    if detail is EMPTY or detail == EMPTY:
        return {}
    arguments = {
        "Input Dims": detail.dims, "Input Strides": detail.strides, "Input type": detail.types,
        "Concrete Inputs": detail.concrete, "grid": detail.grid, "block": detail.block,
        "registers per thread": detail.registers, "shared memory": detail.shared_bytes,
        "Call stack": detail.stack, "Module Hierarchy": detail.module,
    }  # fmt: skip
    return {name: value for name, value in arguments.items() if value not in ((), "", NONE)} | dict(detail.collective)
