"""PyTorch's memory snapshot: what the caching allocator held, and what it did up to then.

The file is a pickle that anybody may have written, so nothing in it is called: only plain containers, numbers and
strings are built, whatever else it names is refused. What is whole is kept; what is not is counted in `lost`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from sublight.errors import BadInput

_SEGMENT_ACTIONS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
ACTIONS = frozenset(("alloc", "free_requested", "free_completed", "oom", *_SEGMENT_ACTIONS))
ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")  # the last: what older versions wrote
MOST_BYTES = 2**44  # above this it is no size: no device has 17 TB, and sums must stay below 2**63
MOST = 2**62  # of any number here
ROOM = (1 << 30, 64)  # memory that loading may take: a gigabyte, and so many times the file
GZIP = b"\x1f\x8b"
_PICKLE = re.compile(rb"\x80[\x02-\x05]|\(dp|\}q|\(lp|\]q", re.DOTALL)
_JSON = re.compile(rb'\s*\{\s*"(segments|device_traces|allocator_settings|external_annotations)"')


class Frame(NamedTuple):
    """One line of a stack."""

    filename: str
    line: int
    name: str


Stack = tuple[Frame, ...]  # innermost first


class Event(NamedTuple):
    """What the allocator did."""

    action: str
    address: int
    bytes: int
    time_us: int
    stack: Stack


class Block(NamedTuple):
    """A piece of a segment when the snapshot was taken."""

    address: int
    bytes: int  # what was asked for, before rounding
    active: bool
    stack: Stack


class Segment(NamedTuple):
    """Memory that the allocator took from the device."""

    address: int
    bytes: int
    device: int
    expandable: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The allocator's state at the end, and by device the events that led to it, oldest first."""

    source: str
    segments: tuple[Segment, ...]
    events: tuple[tuple[Event, ...], ...]
    timed: bool = True  # older versions wrote no times
    lost: tuple[str, ...] = ()


def looks_like(head: bytes) -> bool:
    """Whether a file that begins so is a snapshot, as a pickle or as JSON, rather than a trace.

    >>> looks_like(b"\\x80\\x04\\x95"), looks_like(b'{"segments": ['), looks_like(b'{"traceEvents": [')
    (True, True, False)
    """
    return bool(_PICKLE.match(head) or _JSON.match(head))


def head_of(path: Path, size: int = 4096) -> bytes:
    """The first bytes, of what is inside where the file is compressed."""
    with _open(path) as file:
        try:
            return file.read(size)
        except (OSError, EOFError, ValueError):  # gzip's, zlib's: a loader says what is wrong with it
            return b""


def load(path: Path) -> Snapshot:
    """A snapshot from a file; one clear line where it is not one."""
    with _open(path) as file:
        try:
            head = file.read(4096)
            file.seek(0)
            with _bounded(ROOM[0] + ROOM[1] * path.stat().st_size):
                data = msgspec.json.decode(file.read()) if _JSON.match(head) else _Plain(file).load()
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        except MemoryError:
            raise BadInput(f"{path} asks for far more memory than a snapshot of its size: it is damaged") from None
        except (EOFError, pickle.UnpicklingError, msgspec.DecodeError, OSError) as error:
            cut = "truncated" in str(error) or isinstance(error, EOFError)
            what = "ends too early: it was cut off" if cut else "cannot be read: it is damaged or no pickle"
            raise BadInput(f"{path} {what}; write it anew with torch.cuda.memory._dump_snapshot") from None
        except Exception:  # a damaged pickle fails in any way: a missing key, a bad index, an unhashable name
            raise BadInput(f"{path} cannot be read: it is a damaged pickle") from None
    return parse(data, source=str(path))


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as file:
            if file.read(2) == GZIP:
                file.seek(0)
                with gzip.open(file) as inner:
                    yield io.BufferedReader(inner)  # type: ignore[arg-type]
            else:
                file.seek(0)
                yield file
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from None


class _Plain(pickle.Unpickler):
    """Builds what Python has syntax for; with nothing to call, a pickle can run nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise BadInput(f"a memory snapshot holds no {f'{module}.{name}'[:80]!r}: refused, nothing was run")

    def persistent_load(self, pid: Any) -> Any:
        raise BadInput("a memory snapshot refers to nothing outside: refused")


@contextlib.contextmanager
def _bounded(room_bytes: int) -> Iterator[None]:
    """A few bytes of a pickle can ask for a table of 64 GB: past this room that is a MemoryError, where Linux helps."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + room_bytes
        limits = [value for value in (limit, *before) if value != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def parse(data: Any, *, source: str = "this run") -> Snapshot:
    """A snapshot from what `torch.cuda.memory._snapshot()` returns."""
    if isinstance(data, list):  # before torch 2.0: the segments alone
        data = {"segments": data}
    if not isinstance(data, dict) or not isinstance(data.get("segments", data.get("device_traces")), list):
        raise BadInput(f"{source} is no memory snapshot: it holds neither segments nor device_traces")
    reader = _Reader()
    segments = tuple(filter(None, map(reader.segment, reader.items(data.get("segments")))))
    traces = reader.items(data.get("device_traces"))
    events = tuple(tuple(filter(None, map(reader.event, reader.items(trace)))) for trace in traces)
    if reader.bad and not segments and not any(events):
        raise BadInput(f"{source} is no memory snapshot: none of its {reader.bad:,} entries can be read")
    lost = (f"{reader.bad:,} entries of the snapshot could not be read",) if reader.bad else ()
    return Snapshot(
        source=source,
        segments=segments,
        events=events,
        timed=reader.timed,
        lost=lost,
    )


class _Reader:
    """Checks each entry; equal stacks are kept once, and a list of frames that many entries share is read once."""

    def __init__(self) -> None:
        self.bad = 0
        self.timed = True
        self.seen: dict[int, tuple[Any, Stack]] = {}  # by identity; holds the list, so that its id stays its own
        self.stacks: dict[Stack, Stack] = {}
        self.met: set[int] = set()

    def event(self, entry: Any) -> Event | None:
        action = entry.get("action") if isinstance(entry, dict) else None
        if not isinstance(action, str):
            self.bad += 1
            return None
        if action not in ACTIONS:
            return None
        address = entry.get("addr", entry.get("device_free", 0) if action == "oom" else None)
        time_us = entry.get("time_us")
        if not _whole(address) or not _whole(entry.get("size"), MOST_BYTES):
            self.bad += 1
            return None
        if not _whole(time_us):
            self.timed, time_us = False, 0
        return Event(action, address, entry["size"], time_us, self.stack(entry.get("frames")))

    def segment(self, entry: Any) -> Segment | None:
        whole = isinstance(entry, dict) and _whole(entry.get("address")) and _whole(entry.get("total_size"), MOST_BYTES)
        if not whole:
            self.bad += 1
            return None
        device = entry.get("device", 0)
        blocks, address = [], entry["address"]
        for each in self.items(entry.get("blocks")):
            block = self._block(each, address)
            if block is not None:
                blocks.append(block)
                address = block.address + each["size"]
        expandable = entry.get("is_expandable") is True
        device = device if _whole(device) else 0
        return Segment(entry["address"], entry["total_size"], device, expandable, tuple(blocks))

    def _block(self, block: Any, address: int) -> Block | None:
        if not isinstance(block, dict) or not _whole(block.get("size"), MOST_BYTES):
            self.bad += 1
            return None
        history = block.get("history")  # of older versions: what the block was used for, the latest first
        old: Any = history[0] if isinstance(history, list) and history and isinstance(history[0], dict) else {}
        wanted = block.get("requested_size", old.get("real_size"))
        return Block(
            block["address"] if _whole(block.get("address")) else address,  # older: blocks follow one another
            wanted if _whole(wanted, MOST_BYTES) and wanted else block["size"],
            block.get("state") in ACTIVE,
            self.stack(block.get("frames", old.get("frames"))),
        )

    def items(self, value: Any) -> list[Any]:
        """A list's items, once: else a small file that names one list a million times takes forever."""
        if not isinstance(value, list) or id(value) in self.met:
            return []
        self.met.add(id(value))
        return value

    def stack(self, frames: Any) -> Stack:
        if not isinstance(frames, list):
            return ()
        known = self.seen.get(id(frames))
        if known is not None:
            return known[1]
        found = tuple(
            Frame(printable(frame["filename"]), _line(frame), printable(frame["name"]))
            for frame in frames
            if isinstance(frame, dict) and isinstance(frame.get("filename"), str) and isinstance(frame.get("name"), str)
        )
        found = self.stacks.setdefault(found, found)
        self.seen[id(frames)] = (frames, found)
        return found


def _whole(value: Any, most: int = MOST) -> bool:
    return type(value) is int and 0 <= value < most


def _line(frame: Mapping[str, Any]) -> int:
    return frame["line"] if _whole(frame.get("line")) else 0


def printable(words: str, most: int = 300) -> str:
    """A name from somebody else's file without what a terminal or an encoder would stumble over.

    >>> printable("a\\x1b[31mb\\ud800"), printable("x" * 5, 3)
    ('a�[31mb�', 'xx…')
    """
    words = words if len(words) <= most else f"{words[: most - 1]}…"
    return words if words.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in words)
