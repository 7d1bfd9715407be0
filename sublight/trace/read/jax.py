"""JAX's Chrome traces (`*.trace.json.gz`, `perfetto_trace.json.gz`), which XLA's profiler writes, into columns.

They have no categories: what an event is shows in the labels of its process ("/device:GPU:0", "/host:CPU") and of its
thread. A GPU's own work lies on threads called "Stream #…", a TPU's on "XLA Ops"; the device's other threads (modules,
steps, name scopes) are the same time over again, grouped. On a CPU, XLA's own threads run the ops while Python goes on:
they are streams of a device, too.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sublight.errors import BadInput
from sublight.trace.assemble import assemble
from sublight.trace.read.chrome_events import UNREADABLE, Raw, loose_json, word
from sublight.trace.read.pieces import open_pieces
from sublight.trace.record import EMPTY, NONE, XLA_CPU, Detail, Device, Kind, Lane, Trace

MARK = b'"highres-ticks"'  # before the events, in what XLA writes
MOST_S = 24 * 3600.0
_DEVICE = re.compile(r"/device:(?P<kind>[A-Z]+):(?P<index>\d+)(?:\s*\(?(?P<name>[^()]*)\)?)?")
_API = re.compile(r"^(cu|cuda|hip)[A-Z]")
_EXECUTES = re.compile(r"LoadedExecutable::ExecuteHelper|TfrtCpuExecutable::ExecuteHelper")
_DETAILS = re.compile(r"(\w+):(\S+)")
_EMPTY_LAST = re.compile(rb",\s*+\{\s*+\}$")
_NOTHING = Raw()


def _named(name: str) -> Any:
    return msgspec.field(default=_NOTHING, name=name)


class _Args(msgspec.Struct, gc=False):
    """Every value stays text: XLA writes numbers as words, now and then."""

    correlation: Raw = _named("correlation_id")
    kernel: Raw = _named("kernel_details")
    memcpy: Raw = _named("memcpy_details")
    memset: Raw = _named("memset_details")
    hlo_op: Raw = _NOTHING
    hlo_module: Raw = _NOTHING
    tf_op: Raw = _NOTHING
    name: Raw = _NOTHING
    step: Raw = _named("step_num")
    run_id: Raw = _NOTHING
    source: Raw = _NOTHING


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = float("nan")
    dur: float = 0.0
    name: str = ""
    args: _Args | None = None


_decode = msgspec.json.Decoder(list[_Event], strict=False).decode
_decode_one = msgspec.json.Decoder(_Event, strict=False).decode
_NO_ARGS = _Args()


@dataclass(slots=True)
class _Read:
    """What the file holds, before anything is judged."""

    spans: list[_Event] = field(default_factory=list)
    processes: dict[Any, str] = field(default_factory=dict)
    threads: dict[tuple[Any, Any], str] = field(default_factory=dict)
    broken: int = 0

    def add(self, text: bytes, boundary: re.Pattern[bytes]) -> None:
        try:
            events = _decode(text)
        except UNREADABLE:
            events = self._one_by_one(text, boundary)
        for event in events:
            if event.ph == "X":
                self.spans.append(event)
            elif event.ph == "M" and event.args is not None:
                if event.name == "process_name":
                    self.processes[event.pid] = _text(event.args.name)
                elif event.name == "thread_name":
                    self.threads[event.pid, event.tid] = _text(event.args.name)

    def _one_by_one(self, text: bytes, boundary: re.Pattern[bytes]) -> list[_Event]:
        events = []
        starts = [1, *(match.end() for match in boundary.finditer(text))]
        for start, end in zip(starts, (*starts[1:], len(text)), strict=True):
            part = text[start:end].strip(b", \t\r\n").removesuffix(b"]").rstrip(b", \t\r\n")
            try:
                events.append(_decode_one(part))
            except UNREADABLE:
                if part not in (b"", b"{}"):
                    self.broken += 1
        return events


def is_jax(head: bytes) -> bool:
    """Whether a trace is JAX's, by what stands before its events."""
    return MARK in head


def load(path: Path) -> Trace:
    """A trace of JAX's, as much of it as can be read."""
    pieces, read = open_pieces(path), _Read()
    for text, last in pieces:
        read.add(_closed(text) if last else text, pieces.boundary)
    lost = list(pieces.lost)
    timed = [span.ts for span in read.spans if np.isfinite(span.ts)]
    middle_us, most_us = float(np.median(timed)) if timed else 0.0, MOST_S * 1e6
    spans = [span for span in read.spans if abs(span.ts - middle_us) < most_us and 0 <= span.dur < most_us]
    if dropped := len(read.spans) - len(spans):
        lost.append(f"{dropped:,} event{'s' * (dropped > 1)} had no usable time.")
    if read.broken:
        lost.append(f"{read.broken:,} event{'s' * (read.broken > 1)} could not be read.")
    return _Columns(read, spans).trace(str(path), lost)


def _closed(text: bytes) -> bytes:
    """The last array, up to the bracket that closes it: the events end with an empty one."""
    for end in (b"}]", b"} ]", b"}\n]", b"}\r\n]"):
        if (at := text.rfind(end)) >= 0:
            return _EMPTY_LAST.sub(b"", text[: at + 1]) + b"]"
    return text.rstrip(b", \t\r\n") + b"]"


class _Columns:
    """Spans as the columns of a Trace."""

    def __init__(self, read: _Read, spans: list[_Event]) -> None:
        self.read = read
        self.names: dict[str, int] = {}
        self.lanes: dict[Lane, int] = {}
        self.details = [EMPTY]
        self.detail_of: dict[tuple[bytes, ...], int] = {}  # by the texts that it is made of
        self.rows: list[tuple[float, ...]] = []
        self.devices: dict[int, Device] = {}
        self.kinds: Counter[str] = Counter()
        on_host = [span for span in spans if not _DEVICE.match(read.processes.get(span.pid, ""))]
        groups, self.launches = _groups_on_cpu(on_host), _launches_on_cpu(on_host)
        for span in spans:
            if id(span) not in groups:
                self._add(span)

    def _add(self, span: _Event) -> None:
        args = span.args or _NO_ARGS
        process = self.read.processes.get(span.pid, "")
        thread = self.read.threads.get((span.pid, span.tid), "")
        device = _DEVICE.match(process)
        if device:
            if not _is_work(device["kind"], thread, args):
                return
            index = int(device["index"])
            self.devices.setdefault(index, Device(index=index, name=(device["name"] or "").strip()))
            kind = _device_kind(span.name)
            lane = Lane(kind="stream", process=process, number=_stream(thread, span.tid), device=index)
        elif args.hlo_op:
            self.devices.setdefault(0, Device(index=0, name=XLA_CPU))
            kind = Kind.KERNEL
            lane = Lane(kind="stream", process=process, number=str(span.tid), device=0, label=thread)
        else:
            kind = Kind.RUNTIME if id(span) in self.launches else _host_kind(span.name, args)
            lane = Lane(kind="thread", process=process or str(span.pid), number=str(span.tid), label=thread)
        name = word(span.name)
        if kind == Kind.RANGE:
            name = f"{name}#{_text(args.step)}"
        elif kind == Kind.PYTHON:
            name = _python(name)
        elif kind == Kind.MEMCPY:
            name = _copy(name, _facts(args.memcpy))
        self.kinds[kind.name] += 1
        row = (
            kind, self.names.setdefault(name, len(self.names)), self.lanes.setdefault(lane, len(self.lanes)),
            self._detail(kind, args), span.ts, span.dur, self.launches.get(id(span)) or _whole(_text(args.correlation)),
            _whole(_facts(args.memcpy if kind == Kind.MEMCPY else args.memset).get("size", "")),
        )  # fmt: skip
        self.rows.append(row)

    def _detail(self, kind: Kind, args: _Args) -> int:
        if kind not in (Kind.KERNEL, Kind.OP):
            return 0
        texts = tuple(map(bytes, (args.kernel, args.tf_op, args.name, args.hlo_module, args.hlo_op, args.source)))
        if texts in self.detail_of:
            return self.detail_of[texts]
        facts = _facts(args.kernel)
        path = _text(args.tf_op) or _text(args.name)
        file, _, line = _text(args.source).rpartition(":")
        detail = Detail(
            grid=_sizes(facts.get("grid", "")),
            block=_sizes(facts.get("block", "")),
            registers=_whole(facts.get("regs", "")),
            module=path if path and not path.startswith("XlaModule") else _text(args.hlo_module),
            stack=f"{file}({line}): {path.rpartition('/')[2]}" if file and line.isdecimal() else "",
        )
        self.details.append(detail)
        self.detail_of[texts] = len(self.details) - 1
        return self.detail_of[texts]

    def trace(self, source: str, lost: list[str]) -> Trace:
        if not self.rows:
            raise BadInput(f"{source} holds no event that can be used: it is an empty trace of JAX's")
        table = np.array(self.rows, dtype=np.float64).T
        start = np.rint((table[4] - table[4].min()) * 1000).astype(np.int64)
        end = start + np.rint(table[5] * 1000).astype(np.int64)
        whole = table[[0, 1, 2, 3, 6, 7]].astype(np.int64)
        return assemble(
            source=source,
            tool="jax",
            kind=whole[0].astype(np.uint8),
            name_ids=whole[1].astype(np.int32),
            names=list(self.names),
            lane_ids=whole[2].astype(np.int32),
            lanes=list(self.lanes),
            detail_ids=whole[3].astype(np.int32),
            details=self.details,
            start_ns=start,
            end_ns=end,
            correlation=whole[4],
            bytes=whole[5],
            devices=[self.devices[index] for index in sorted(self.devices)],
            lost=lost,
        )


def _groups_on_cpu(spans: list[_Event]) -> set[int]:
    """Ops on a CPU that others run inside of, as a loop's: the same time over again. By id."""
    groups: set[int] = set()
    ops: dict[tuple[Any, Any], list[_Event]] = {}
    for span in spans:
        if span.args is not None and span.args.hlo_op:
            ops.setdefault((span.pid, span.tid), []).append(span)
    for line in ops.values():
        line.sort(key=lambda span: (span.ts, -span.dur))
        groups |= {
            id(outer)
            for outer, inner in itertools.pairwise(line)
            if inner.ts + inner.dur <= outer.ts + outer.dur and inner.ts < outer.ts + outer.dur
        }
    return groups


def _launches_on_cpu(spans: list[_Event]) -> dict[int, int]:
    """Which call started an op on a CPU: calls and ops by id, with the same number. XLA numbers its runs, but not the
    calls, so the calls in their order are taken for the runs in the order of their first ops; none where they are not
    as many.
    """
    calls = sorted((span for span in spans if _EXECUTES.search(span.name)), key=lambda span: span.ts)
    runs: dict[str, list[_Event]] = {}
    for span in sorted(spans, key=lambda span: span.ts):
        if span.args is not None and span.args.hlo_op and (run := _text(span.args.run_id)):
            runs.setdefault(run, []).append(span)
    if len(calls) != len(runs):
        return {}
    numbered = enumerate(zip(calls, runs.values(), strict=True), 1)
    return {id(span): number for number, (call, ops) in numbered for span in (call, *ops)}


def _is_work(kind: str, thread: str, args: _Args) -> bool:
    """Whether a device's thread holds its work itself, rather than groups of it."""
    if kind == "TPU":
        return thread == "XLA Ops"
    if thread:
        return thread.startswith("Stream #")
    return bool(args.kernel or args.memcpy or args.memset or args.hlo_op)


def _stream(thread: str, tid: int | str | None) -> str:
    """
    >>> _stream("Stream #13(Compute)", 7), _stream("XLA Ops", 3)
    ('13', '3')
    """
    found = re.match(r"Stream #(\d+)", thread)
    return found[1] if found else str(tid)


def _device_kind(name: str) -> Kind:
    if name.lower().startswith("memcpy"):
        return Kind.MEMCPY
    return Kind.MEMSET if name.lower().startswith("memset") else Kind.KERNEL


def _host_kind(name: str, args: _Args) -> Kind:
    if args.step:
        return Kind.RANGE
    if name.startswith("$"):
        return Kind.PYTHON
    return Kind.RUNTIME if _API.match(name) else Kind.OP


def _python(name: str) -> str:
    """As PyTorch's profiler writes a frame.

    >>> _python("$train.py:41 step"), _python("$builtins.print")
    ('train.py(41): step', 'builtins.print')
    """
    found = re.match(r"\$(?P<file>.+):(?P<line>\d+) (?P<function>.+)", name)
    return f"{found['file']}({found['line']}): {found['function']}" if found else name.removeprefix("$")


def _copy(name: str, facts: dict[str, str]) -> str:
    """As CUPTI names a copy.

    >>> _copy("MemcpyH2D", {"kind_src": "pageable", "kind_dst": "device"})
    'Memcpy HtoD (Pageable -> Device)'
    """
    way = name.removeprefix("Memcpy").replace("2", "to")
    if way not in ("HtoD", "DtoH", "DtoD", "PtoP", "HtoH"):
        return name
    sides = [facts.get(side, "").capitalize() for side in ("kind_src", "kind_dst")]
    usual = {"HtoD": ("Pinned", "Device"), "DtoH": ("Device", "Pinned")}.get(way, ("Device", "Device"))
    return f"Memcpy {way} ({sides[0] or usual[0]} -> {sides[1] or usual[1]})"


def _facts(text: Raw) -> dict[str, str]:
    """
    >>> _facts(Raw(b'"regs:16 grid:4,1,1"'))
    {'regs': '16', 'grid': '4,1,1'}
    """
    return dict(_DETAILS.findall(_text(text)))


def _text(value: Raw) -> str:
    """A word or a number as words; empty where there is none."""
    if not value:
        return ""
    found = loose_json(bytes(value))
    return word(found) if isinstance(found, str) else str(found) if isinstance(found, int | float) else ""


def _whole(text: str) -> int:
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 16 else NONE


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(_whole(part) for part in text.split(",")) if text else ()
    return sizes if all(0 < size < 2**31 for size in sizes) else ()
