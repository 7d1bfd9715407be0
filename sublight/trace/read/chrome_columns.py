"""Events of a Chrome trace as columns: equal names, lanes and details are stored once.

Events of a category are taken together, column by column, so that nothing is done for each event in Python.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from sublight.errors import BadInput
from sublight.trace.assemble import assemble
from sublight.trace.intervals import middle
from sublight.trace.read.chrome_details import (
    BETWEEN,
    KERNEL_TEXTS,
    LAYOUTS,
    OP_TEXTS,
    RARE_TEXTS,
    TEXTS,
    detail_record,
    devices_of,
    small,
)
from sublight.trace.read.chrome_events import (
    MOST_DIGITS,
    NO_ARGS,
    AllocatorArgs,
    Args,
    Begin,
    End,
    Event,
    Instant,
    Label,
    Span,
    number,
)
from sublight.trace.record import NONE, Ints, Kind, Lane, MemoryLog, Trace

KEPT_US = 10**10  # of a time too long for a float, the digits that are kept, and a 1 in front of them
DAY_US = 24 * 3600 * 1e6
MOST_EVENTS = 50_000_000  # of a file: more is no trace that anybody could look at
KINDS = {
    "python_function": Kind.PYTHON,
    "user_annotation": Kind.RANGE,
    "cpu_op": Kind.OP,
    "operator": Kind.OP,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME,
    "xpu_driver": Kind.RUNTIME,
    "mtia_runtime": Kind.RUNTIME,
    "privateuse1_runtime": Kind.RUNTIME,
    "privateuse1_driver": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "overhead": Kind.OVERHEAD,
    "kernel": Kind.KERNEL,
    "mtia_ccp_events": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "memset": Kind.MEMSET,
    "gpu_user_annotation": Kind.DEVICE_RANGE,
    "cuda_sync": Kind.SYNC,
}
_OTHERS = frozenset((Begin, End, Instant, Label))
_ENCLOSING_FIRST = tuple(dict.fromkeys(KINDS.values()))  # of two events with the same times, what is likely outside
_ON_STREAMS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET, Kind.DEVICE_RANGE, Kind.SYNC)
_PARTS = ("dma_request",)  # of a kernel, which the profiler of MTIA writes beside it
_RANGES = ("ProfilerStep#", "enumerate(DataLoader)#", "Optimizer.step#", "Optimizer.zero_grad#")  # ops in old schemas
_INTEGERS = ("correlation", "external", "sequence", "graph_node")
_INTEGERS_OF: Mapping[Kind, tuple[str, ...]] = {
    Kind.PYTHON: (),
    Kind.OVERHEAD: (),
    Kind.RANGE: ("external", "sequence"),
    Kind.OP: ("external", "sequence"),
    Kind.RUNTIME: ("correlation", "external"),
}
_DETAILED = (Kind.OP, Kind.RANGE, Kind.KERNEL)
_rare_texts, _dims = [attrgetter(text) for text in RARE_TEXTS], attrgetter("dims")


class _Ids(dict[Any, int]):
    """Each distinct value's number, counted from 0 as they come."""

    def __missing__(self, value: Hashable) -> int:
        self[value] = count = len(self)
        return count


class Columns:
    """What the pieces add up to."""

    def __init__(self) -> None:
        self.names, self.lanes, self.details = _Ids(), _Ids(), _Ids()
        self.details[b""]  # details[0] is EMPTY
        self.parts: dict[Kind, list[dict[str, Any]]] = defaultdict(list)
        self.memory: list[tuple[float, ...]] = []
        self.labels: dict[tuple[Any, Any], str] = {}
        self.open: dict[tuple[Any, Any], list[Begin]] = defaultdict(list)
        self.uncategorised = 0
        self.count = self.broken = self.odd = self.untimed = self.negative = self.far = 0
        self.cut_off = self.unclosed = self.too_many = False

    def add(self, events: Iterable[Event]) -> None:
        groups: dict[str | None, list[Span]] = defaultdict(list)
        others: list[Event] = []
        for event in events:
            if type(event) is Span:
                groups[event.cat].append(event)
            elif type(event) in _OTHERS:
                others.append(event)
        for span in self._spans(others):
            groups[span.cat].append(span)
        for category, members in groups.items():
            kind = KINDS.get((category or "").lower())
            if kind is not None:
                self.count += len(members)
                self.parts[kind].append(self._part(members, kind))
            elif not category:
                self.uncategorised += len(members)
        self.too_many = self.count > MOST_EVENTS

    def _part(self, events: list[Span], kind: Kind) -> dict[str, Any]:
        count = len(events)
        args = [event.args or NO_ARGS for event in events]
        names, lanes = self.names, self.lanes
        if kind in _ON_STREAMS:
            places = [
                lanes[(arg.device, arg.stream), (event.pid, event.tid)] for arg, event in zip(args, events, strict=True)
            ]
        else:
            places = [lanes[event.pid, event.tid] for event in events]
        part = {
            "name": np.array([names[event.name] for event in events], dtype=np.int32),
            "lane": np.array(places, dtype=np.int32),
            "detail": self._details(args, kind),
            "ts": np.array([event.ts for event in events]),
            "dur": np.array([event.dur for event in events]),
            "bytes": np.full(count, NONE, dtype=np.int64),
        }
        wanted = _INTEGERS_OF.get(kind, _INTEGERS)
        for column in _INTEGERS:
            part[column] = _integers(args, column) if column in wanted else np.full(count, NONE, dtype=np.int64)
        if "external" in wanted and not np.any(part["external"] != NONE):
            part["external"] = _integers(args, "old_external")
        if kind in (Kind.MEMCPY, Kind.MEMSET):
            part["bytes"] = _whole(np.array([arg.bytes for arg in args], dtype=np.float64))
        return part

    def _details(self, args: list[Args], kind: Kind) -> npt.NDArray[np.int32]:
        if kind not in _DETAILED:
            return np.zeros(len(args), dtype=np.int32)
        texts = LAYOUTS[len(TEXTS)]
        if not any(any(map(text, args)) for text in _rare_texts):
            if kind == Kind.KERNEL:
                texts = LAYOUTS[len(KERNEL_TEXTS)]
            elif any(map(_dims, args)):
                texts = LAYOUTS[len(OP_TEXTS)]
        keys = map(BETWEEN.join, map(attrgetter(*texts), args))
        return np.fromiter(map(self.details.__getitem__, keys), dtype=np.int32, count=len(args))

    def _spans(self, events: Iterable[Event]) -> list[Span]:
        """Spans that begin and end apart; on the way, names of threads and the allocator's events are kept."""
        spans: list[Span] = []
        for event in events:
            if isinstance(event, Instant):
                if event.name == "[memory]" and event.args is not None and math.isfinite(event.ts):
                    self.memory.append((event.ts, *_memory_facts(event.args)))
            elif isinstance(event, Label):
                if event.name in ("thread_name", "process_name") and event.args is not None:
                    thread = _number(event.tid) if event.name == "thread_name" else None
                    self.labels[_number(event.pid), thread] = event.args.name
            elif isinstance(event, Begin):
                self.open[event.pid, event.tid].append(event)
            elif isinstance(event, End) and (stack := self.open.get((event.pid, event.tid))):
                begun = stack.pop()
                begun.dur = event.ts - begun.ts
                spans.append(begun)
        return spans

    @property
    def of_devices(self) -> bool:
        """Whether it is a trace of JAX's: events without categories, in processes that are named as XLA names them."""
        named = any(label.startswith(("/device:", "/host:")) for label in self.labels.values())
        return self.uncategorised > 0 and named

    def lost(self) -> list[str]:
        """What could not be used, a sentence each."""
        unfinished = sum(map(len, self.open.values()))
        counts = {
            "could not be read": self.broken,
            "could be read only in part": self.odd,
            "began and never ended": unfinished,
            "had no time": self.untimed,
            "had a negative duration": self.negative,
            "had a time far from the others (a clock jump)": self.far,
        }
        sentences = [f"{count:,} event{'s' if count > 1 else ''} {what}." for what, count in counts.items() if count]
        if self.cut_off:
            sentences.insert(0, f"The file ends in the middle of an event: {self.count:,} events before it were used.")
        if self.unclosed:
            sentences.insert(0, f"The file ends without closing its events: the {self.count:,} in it were used.")
        if self.too_many:
            sentences.insert(0, f"The file holds more than {MOST_EVENTS:,} events: the first {self.count:,} were used.")
        return sentences

    def trace(self, source: str, top: Mapping[str, Any], lost: list[str], offset_us: int = 0) -> Trace:
        """`offset_us` was taken off every time when the file was read."""
        if not self.count:
            why = " ".join([*lost, *self.lost()]) or "it is an empty trace"
            raise BadInput(f"{source} holds no event that can be used: {why}")
        column = self._joined()
        column["kind"][self._named(column, Kind.OP, _RANGES)] = Kind.RANGE
        column["kind"][self._named(column, Kind.KERNEL, _PARTS)] = Kind.DEVICE_RANGE
        ts, dur = column.pop("ts"), column.pop("dur")
        if offset_us:
            ts = _without(ts, offset_us)
        keep, base_us = self._usable(ts, dur)
        if not keep.any():
            raise BadInput(f"{source} holds no event with a usable time: {' '.join([*lost, *self.lost()])}")
        if not keep.all():
            column, ts, dur = {name: values[keep] for name, values in column.items()}, ts[keep], dur[keep]
        start_ns = np.rint((ts - base_us) * 1000).astype(np.int64)
        lane_ids, lanes = self._lane_records()
        log, addresses = self._memory_log(base_us, offset_us)
        meta = top.get("sublight")
        meta = dict(meta) if isinstance(meta, dict) else {}
        info = top.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        trace = assemble(
            source=source,
            tool="pytorch",
            kind=column["kind"],
            name_ids=column["name"],
            names=list(self.names),
            lane_ids=lane_ids[column["lane"]],
            lanes=lanes,
            detail_ids=column["detail"],
            details=[detail_record(key) for key in self.details],
            start_ns=start_ns,
            end_ns=start_ns + np.rint(dur * 1000).astype(np.int64),
            **{name: column[name] for name in (*_INTEGERS, "bytes")},
            devices=devices_of(top.get("deviceProperties")),
            rank=small(info.get("rank")),
            world_size=small(info.get("world_size")),
            lost=[*lost, *self.lost()],
            meta={**meta, "memory_addresses": addresses} if addresses is not None else meta,
            memory=log,
        )
        whole_us = math.floor(base_us)
        given_ns = top.get("baseTimeNanoseconds")
        given_ns = given_ns if isinstance(given_ns, int) and abs(given_ns) < 2**62 else 0
        zero_ns = given_ns + (offset_us + whole_us) * 1000 + round((base_us - whole_us) * 1000)
        return dataclasses.replace(trace, base_ns=zero_ns)

    def _joined(self) -> dict[str, Any]:
        """The columns of all kinds, so that among equal times the outer kinds come first."""
        kinds = [kind for kind in _ENCLOSING_FIRST if kind in self.parts]
        parts = [part for kind in kinds for part in self.parts[kind]]
        column = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        sizes = [sum(len(part["ts"]) for part in self.parts[kind]) for kind in kinds]
        column["kind"] = np.repeat(np.array(kinds, dtype=np.uint8), sizes)
        self.parts.clear()
        return column

    def _named(self, column: dict[str, Any], kind: Kind, begins: tuple[str, ...]) -> Any:
        """Events of this kind whose name begins so."""
        named = np.fromiter((name.startswith(begins) for name in self.names), dtype=bool, count=len(self.names))
        return (column["kind"] == kind) & named[column["name"]]

    def _usable(self, ts: Any, dur: Any) -> tuple[Any, float]:
        """Events with a time that can be: finite, not backwards, within a day of the middle one."""
        timed = np.isfinite(ts) & np.isfinite(dur)
        self.untimed = int(np.count_nonzero(~timed))
        forward = timed & (dur >= 0)
        self.negative = int(np.count_nonzero(timed & ~forward))
        half = middle(ts[forward]) if forward.any() else 0.0
        with np.errstate(invalid="ignore"):
            near = forward & (np.abs(ts - half) < DAY_US) & (dur < DAY_US)
        self.far = int(np.count_nonzero(forward & ~near))
        return near, float(ts[near].min()) if near.any() else 0.0

    def _memory_log(self, base_us: float, offset_us: int) -> tuple[MemoryLog | None, Ints | None]:
        """The allocator's events in order of time, and their addresses where every one has one."""
        if not self.memory:
            return None, None
        rows = np.array(self.memory, dtype=np.float64)
        rows[:, 0] = _without(rows[:, 0], offset_us) if offset_us else rows[:, 0]
        near = np.flatnonzero(np.abs(rows[:, 0] - base_us) < DAY_US)
        order = near[np.argsort(rows[near, 0], kind="stable")]
        if not len(order):
            return None, None
        rows = rows[order]
        whole = rows[:, 1:5].clip(-(2.0**62), 2.0**62).astype(np.int64)
        log = MemoryLog(
            time_ns=np.rint((rows[:, 0] - base_us) * 1000).astype(np.int64),
            delta_bytes=whole[:, 0],
            allocated_bytes=whole[:, 1],
            reserved_bytes=whole[:, 2],
            device=whole[:, 3],
        )
        addresses = np.fromiter((self.memory[at][5] for at in order.tolist()), dtype=np.int64, count=len(order))
        return log, addresses if (addresses > 0).all() else None

    def _lane_records(self) -> tuple[npt.NDArray[np.int32], list[Lane]]:
        """Each lane once, and for each place that the file names, which: schemas differ in how they write one."""
        numbers = _Ids()
        ids = np.array([numbers[_lane(key)] for key in self.lanes], dtype=np.int32)
        return ids, [self._lane_record(*key) for key in numbers]

    def _lane_record(self, kind: str, process: int | str, number: int | str) -> Lane:
        if kind == "stream":
            device = process if isinstance(process, int) and 0 <= process < 2**31 else NONE
            return Lane(kind="stream", process=f"GPU {process}", number=str(number), device=device)
        program = self.labels.get((process, None)) or ""
        name = f"{program} {process}".strip() if isinstance(process, int) else process
        return Lane(kind="thread", process=name, number=str(number), label=self.labels.get((process, number)) or "")


def _without(ts: Any, offset_us: int) -> Any:
    """Times less the offset; those that begin with the offset's digits had it taken off as the file was read."""
    taken_off = (ts >= KEPT_US) & (ts < 2 * KEPT_US)
    return np.where(taken_off, ts, ts - offset_us)


def _lane(key: Any) -> tuple[str, int | str, int | str]:
    if isinstance(key[0], tuple):
        (device, stream), (pid, tid) = key
        return ("stream", _number(pid if device == NONE else device), _number(tid if stream == NONE else stream))
    return ("thread", _number(key[0]), _number(key[1]))


def _number(value: int | str | None) -> int | str:
    """25738, "25738" and "stream 7" as 25738, 25738 and 7.

    >>> _number("stream 7"), _number("Spans"), _number(None)
    (7, 'Spans', -1)
    """
    if isinstance(value, str):
        digits = value.removeprefix("stream ").removeprefix("cuda:")
        sure = digits.isascii() and digits.removeprefix("-").isdecimal() and len(digits) <= MOST_DIGITS
        return int(digits) if sure else value
    return NONE if value is None else value


def _integers(args: list[Args], name: str) -> Ints:
    get = attrgetter(name)
    try:
        return np.fromiter(map(get, args), dtype=np.int64, count=len(args))
    except OverflowError:  # an id that no profiler gives
        return np.array([value if abs(value) < 2**63 else NONE for value in map(get, args)], dtype=np.int64)


def _whole(values: npt.NDArray[np.float64]) -> Ints:
    return np.nan_to_num(values, nan=NONE).clip(NONE, 2.0**62).astype(np.int64)


def _memory_facts(args: AllocatorArgs) -> tuple[float, ...]:
    """Change, total, reserved, device and address."""
    device = args.device if args.device_type and 0 <= args.device < 2**31 else NONE
    address = args.address if 0 < args.address < 2**63 else NONE
    return number(args.delta, 0), number(args.total, NONE), number(args.reserved, NONE), device, address
