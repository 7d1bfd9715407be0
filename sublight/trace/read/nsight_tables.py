"""The tables of an Nsight Systems export as events, under the names that PyTorch's profiler gives the same things."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from sublight.trace.assemble import FAR_NS
from sublight.trace.read import nvtx
from sublight.trace.read.nsight_database import Database
from sublight.trace.record import EMPTY, NONE, Detail, Ints, Kind, Lane

_HOST = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": Kind.RUNTIME,
    "CUPTI_ACTIVITY_KIND_DRIVER": Kind.RUNTIME,
    "PROFILER_OVERHEAD": Kind.OVERHEAD,
    "CUPTI_ACTIVITY_KIND_OVERHEAD": Kind.OVERHEAD,
}
_KERNEL, _GRAPH = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_MEMCPY, _MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_SYNC, _NVTX = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "NVTX_EVENTS"
_DEVICE = {  # syncs last: their devices are known from the others
    _KERNEL: Kind.KERNEL,
    _GRAPH: Kind.KERNEL,
    _MEMCPY: Kind.MEMCPY,
    _MEMSET: Kind.MEMSET,
    _SYNC: Kind.SYNC,
}
TABLES = (*_HOST, *_DEVICE, _NVTX)

_RANGES = "WHERE eventType IN (59, 60, 70, 71)"  # push/pop and start/end, as recorded and as imported from text
_ON_DEVICE = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "graphNodeId", "bytes")
_NAMED_BY = {
    _KERNEL: ("demangledName", "shortName"),
    _GRAPH: ("graphId",),
    _MEMCPY: ("copyKind", "srcKind", "dstKind"),
    _MEMSET: ("memKind",),
    _SYNC: ("syncType",),
}
_LAUNCH = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread")
_SHARED = ("staticSharedMemory", "dynamicSharedMemory")
_API_VERSION = re.compile(r"_v\d{4,}$")  # cudaLaunchKernel_v7000; but cuMemAlloc_v2 is another function than cuMemAlloc
_ANY_STREAM = 0xFFFFFFFF
_COPIES = ("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_MIGRATIONS = ("HtoD", "DtoH", "DtoD")  # kinds 11 to 13: pages of managed memory that move by themselves
_MEMORIES = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown")
_SYNCS = ("Unknown", "Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Columns of events in any order; the numbers are of a Book."""

    kind: Ints
    name: Ints
    lane: Ints
    detail: Ints
    start_ns: Ints
    end_ns: Ints
    process: Ints  # a global id without its thread; NONE: the table does not say
    correlation: Ints
    sequence: Ints
    bytes: Ints
    graph_node: Ints

    def rows(self, chosen: Ints) -> Events:
        return Events(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """What events refer to by number, each once."""

    strings: dict[int, str]  # of the file
    processes: dict[int, str]  # names, by global id without its thread
    threads: dict[int, str]  # names, by global id
    names: dict[str, int] = field(default_factory=dict)
    lanes: dict[Lane, int] = field(default_factory=dict)
    details: list[Detail] = field(default_factory=lambda: [EMPTY])
    devices: dict[tuple[int, int], int] = field(default_factory=dict)  # by process and context

    def name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def lane(self, lane: Lane) -> int:
        return self.lanes.setdefault(lane, len(self.lanes))

    def add(self, detail: Detail) -> int:
        self.details.append(detail)
        return len(self.details) - 1

    def string(self, key: int, what: str) -> str:
        return self.strings.get(key) or (f"unnamed {what} {key}" if key >= 0 else f"unnamed {what}")

    def thread(self, key: int) -> int:
        """The lane of a thread by its global id: 24 bits of thread, 24 bits of process, the machine."""
        if key < 0:
            return self.lane(Lane(kind="thread", process="", number=""))
        process = f"{self.processes.get(key >> 24, '')} {(key >> 24) & 0xFFFFFF}".lstrip()
        return self.lane(
            Lane(kind="thread", process=process, number=str(key & 0xFFFFFF), label=self.threads.get(key, ""))
        )

    def stream(self, device: int, stream: int) -> int:
        number = "all" if stream in (NONE, _ANY_STREAM) else str(stream)
        process = f"GPU {device}" if device >= 0 else "GPU"
        return self.lane(Lane(kind="stream", process=process, number=number, device=max(device, NONE)))


def read(database: Database) -> tuple[Events, Book]:
    """All events of the tables that are there."""
    book = _book(database)
    parts = [_host(database, book, table, kind) for table, kind in _HOST.items()]
    namings = _namings(database, book)
    parts += [_device(database, book, table, kind, namings[table]) for table, kind in _DEVICE.items()]
    parts.append(_ranges(database, book))
    names = [column.name for column in fields(Events)]
    return Events(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}), book


def _book(database: Database) -> Book:
    strings = database.texts("StringIds", "id", "value")
    threads = database.integers("ThreadNames", "globalTid", "nameId")
    names = zip(threads["globalTid"].tolist(), threads["nameId"].tolist(), strict=True)
    processes = database.texts("PROCESSES", "globalPid", "name")
    return Book(
        strings=strings,
        processes={key >> 24: name.rpartition("/")[2] or name for key, name in processes.items()},
        threads={thread: strings.get(name, "") for thread, name in names},
    )


def _host(database: Database, book: Book, table: str, kind: Kind) -> Events:
    columns = database.integers(table, "start", "end", "globalTid", "correlationId", "nameId")
    columns, _ = _timed(database, table, columns)
    what = "call" if kind is Kind.RUNTIME else "overhead"
    names = _by_group(lambda key: book.name(_API_VERSION.sub("", book.string(key, what))), columns["nameId"])
    events = _events(kind, columns, name=names, lane=_by_group(book.thread, columns["globalTid"]))
    if kind is Kind.OVERHEAD:  # it may bear the number of a launch that it delayed, but launches nothing
        events = replace(events, correlation=np.full_like(events.correlation, NONE))
    return events


def _device(database: Database, book: Book, table: str, kind: Kind, naming: Callable[..., str]) -> Events:
    launch = (*_LAUNCH, *_SHARED) if table == _KERNEL else ()
    columns = database.integers(table, *_ON_DEVICE, *_NAMED_BY[table], *launch)
    columns, _ = _timed(database, table, columns)
    context = (_process(columns["globalPid"]), columns["contextId"])
    device = columns["deviceId"]
    if table == _SYNC:  # exports say device 0 for those of any device: the context knows better
        device = _by_group(lambda *key: book.devices.get(key[:2], key[2]), *context, device)
    else:
        _by_group(lambda *key: book.devices.setdefault(key[:2], key[2]) if key[1] >= 0 else NONE, *context, device)
    names = _by_group(lambda *keys: book.name(naming(*keys)), *(columns[name] for name in _NAMED_BY[table]))
    events = _events(kind, columns, name=names, lane=_by_group(book.stream, device, columns["streamId"]))
    return replace(events, detail=_launches(book, columns)) if table == _KERNEL else events


def _namings(database: Database, book: Book) -> dict[str, Callable[..., str]]:
    """By table: what to call an event, given the columns that name it."""
    memories = _labels(database, "ENUM_CUDA_MEM_KIND", _MEMORIES, str.title)
    copies = _labels(database, "ENUM_CUDA_MEMCPY_OPER", (*_COPIES, *_MIGRATIONS), _direction)

    def memory(kind: int) -> str:
        return memories.get(kind, "Unknown")

    return {
        _KERNEL: lambda long, short: book.strings.get(long) or book.string(short if short >= 0 else long, "kernel"),
        _GRAPH: lambda graph: f"CUDA graph {graph}" if graph >= 0 else "CUDA graph",
        _MEMCPY: lambda copy, source, target: (
            f"Memcpy {copies.get(copy, 'Unknown')} ({memory(source)} -> {memory(target)})"
        ),
        _MEMSET: lambda kind: f"Memset ({memory(kind)})",
        _SYNC: lambda kind: _SYNCS[kind] if 0 <= kind < len(_SYNCS) else _SYNCS[0],
    }


def _labels(database: Database, table: str, known: Sequence[str], spell: Callable[[str], str]) -> dict[int, str]:
    """What the file says that the numbers mean, over what they meant where exports did not say."""
    kinds = database.texts(table, "id", "name")  # CUDA_MEMCPY_KIND_HTOD, CUDA_MEMOPR_MEMORY_KIND_DEVICE_STATIC
    words = {key: name.rpartition("KIND_")[2].replace("_", " ") for key, name in kinds.items() if "KIND_" in name}
    return {**dict(enumerate(known)), **{key: spell(word) for key, word in words.items()}}


def _direction(word: str) -> str:
    """
    >>> _direction("HTOD"), _direction("UVM DTOH"), _direction("UNKNOWN")
    ('HtoD', 'DtoH', 'Unknown')
    """
    last = word.rpartition(" ")[2]
    return f"{last[0]}to{last[-1]}" if re.fullmatch("[A-Z]TO[A-Z]", last) else last.title()


def _launches(book: Book, columns: dict[str, Ints]) -> Ints:
    """The detail of every kernel: equal launches share one."""

    def detail(*sizes: int) -> int:
        grid, block, (registers, *shared) = sizes[:3], sizes[3:6], sizes[6:]
        known = [size for size in shared if size >= 0]
        return book.add(
            Detail(
                grid=grid if min(grid) >= 0 else (),
                block=block if min(block) >= 0 else (),
                registers=max(registers, NONE),
                shared_bytes=sum(known) if known else NONE,
            )
        )

    return _by_group(detail, *(columns[name] for name in (*_LAUNCH, *_SHARED)))


def _ranges(database: Database, book: Book) -> Events:
    """NVTX ranges; marks have no duration and are left out."""
    integers = ("start", "end", "globalTid", "textId")
    where = _RANGES if "eventType" in database.columns.get(_NVTX, ()) else "WHERE end IS NOT NULL"
    columns, texts = database.read(_NVTX, integers, ("text",), where)
    columns, kept = _timed(database, _NVTX, columns)
    details = {"": 0}
    rows = []
    for text, key in zip((texts["text"][row] for row in kept.tolist()), columns["textId"].tolist(), strict=True):
        span = nvtx.read(text or book.string(key, "range"))
        if span.sizes not in details:
            details[span.sizes] = book.add(Detail(dims=nvtx.dims(span.sizes)))
        rows.append((int(span.kind), book.name(span.name), span.sequence, details[span.sizes]))
    kind, name, sequence, detail = np.array(rows, dtype=np.int64).reshape(len(rows), 4).T
    events = _events(Kind.RANGE, columns, name=name, lane=_by_group(book.thread, columns["globalTid"]))
    return replace(events, kind=kind, sequence=sequence, detail=detail)


def _timed(database: Database, table: str, columns: dict[str, Ints]) -> tuple[dict[str, Ints], Ints]:
    """The rows that have a start and an end in order, and which ones they are; the others are noted as lost."""
    start, end = columns["start"], columns["end"]
    rows = np.flatnonzero((start >= 0) & (end >= start) & (end < FAR_NS))
    if dropped := len(start) - len(rows):
        had = "1 row" if dropped == 1 else f"{dropped} rows"
        database.lost.append(f"{had} of {table} had no start or no end, or ended before the start.")
    return {name: column[rows] for name, column in columns.items()}, rows


def _events(kind: Kind, columns: dict[str, Ints], *, name: Ints, lane: Ints) -> Events:
    missing = np.full(len(name), NONE, dtype=np.int64)

    def known(column: str) -> Ints:
        values = columns.get(column, missing)
        return np.where(values > 0, values, NONE)  # older exports write 0 for what is not there

    return Events(
        kind=np.full(len(name), int(kind), dtype=np.int64),
        name=name,
        lane=lane,
        detail=np.zeros(len(name), dtype=np.int64),
        start_ns=columns["start"],
        end_ns=columns["end"],
        process=_process(columns["globalTid"] if "globalTid" in columns else columns["globalPid"]),
        correlation=known("correlationId"),
        sequence=missing,
        bytes=columns.get("bytes", missing),
        graph_node=known("graphNodeId"),
    )


def _process(global_ids: Ints) -> Ints:
    return np.where(global_ids > 0xFFFFFF, global_ids >> 24, NONE)


def _by_group(number: Callable[..., int], *columns: Ints) -> Ints:
    """A number for every row, where equal rows get the same: each distinct one is asked for once."""
    group = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        if len(values) > 1:
            group = np.unique(group * len(values) + inverse, return_inverse=True)[1]
    first = np.unique(group, return_index=True)[1]
    keys = zip(*(column[first].tolist() for column in columns), strict=True)
    return np.array([number(*key) for key in keys], dtype=np.int64)[group]
