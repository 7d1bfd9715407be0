"""PyTorch's Chrome traces, any schema since 2021, into columns.

Each piece of text is decoded by msgspec into typed structs and at once into columns. A piece that does not decode is
gone through event by event, so one bad event costs one event.
"""

from __future__ import annotations

import gc
import itertools
import re
from pathlib import Path
from typing import Any

from sublight.trace.complete import complete
from sublight.trace.read import jax
from sublight.trace.read.chrome_columns import KEPT_US, Columns
from sublight.trace.read.chrome_events import UNREADABLE, Event, decode_events, loose_json, objects_in, read_event
from sublight.trace.read.pieces import Pieces, open_pieces
from sublight.trace.record import Trace

TRIES = 4  # of brackets that may close the events, from either side
# possessive: no blank is looked at twice, however many there are
_CLOSE = re.compile(rb"\}\s*+,?+\s*+\]")
_NO_EVENTS = re.compile(rb"\[[\s,]*+\]")
# microseconds since 1970 with nanoseconds behind the point: more digits than a float holds
_TIME = re.compile(rb'"ts"\s*+:')
_LONG_TIME = re.compile(rb'"ts"\s*+:\s*+(\d{6})(?=\d{10}\.\d)')


def load(path: Path) -> Trace:
    """A trace, whole or as much of it as can be read; `Trace.lost` says what could not."""
    pieces = open_pieces(path)
    if jax.is_jax(pieces.head):
        return jax.load(path)
    reader = _Reader(pieces)
    collecting = gc.isenabled()
    gc.disable()  # a million small objects without a cycle: the collector would go through them again and again
    try:
        reader.read()
    finally:
        if collecting:
            gc.enable()
    if not reader.columns.count and reader.columns.of_devices:  # its mark is not at the front: written by another tool
        return jax.load(path)
    top = {**_top(pieces.head), **reader.tail}
    lost = list(pieces.lost)
    if reader.tail.get("traceEvents"):
        lost.append("The file has traceEvents twice: the first were used.")
    return complete(reader.columns.trace(str(path), top, lost, reader.offset_us))


class _Reader:
    """Takes the pieces one by one; knows at the end what stood behind the events."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces, self.columns = pieces, Columns()
        self.tail: dict[str, Any] = {}
        self.offset_us = 0
        self.long: tuple[bytes, bytes] | None = None  # how every time begins, and what to write instead

    def read(self) -> None:
        pieces = iter(self.pieces)
        first = next(pieces)
        if (found := _TIME.search(first[0])) and (found := _LONG_TIME.match(first[0], found.start())):
            self.long = found[0], found[0].removesuffix(found[1]) + b"1"
            self.offset_us = (int(found[1]) - 1) * KEPT_US
        for text, last in itertools.chain((first,), pieces):
            text = text.replace(*self.long) if self.long else text
            if last:
                self._last(text)
                return
            try:
                self.columns.add(decode_events(text))
            except UNREADABLE:
                self._one_by_one(text[1:-1], last=False)
            if self.columns.too_many:
                return

    def _last(self, text: bytes) -> None:
        """The events, whatever bracket closes them, and the keys behind."""
        if found := _NO_EVENTS.match(text):
            self.tail = _behind(text[found.end() :])
            return
        closing = list(_CLOSE.finditer(text))
        for found in dict.fromkeys((*closing[: -TRIES - 1 : -1], *closing[:TRIES])):
            try:
                events = decode_events(text[: found.start() + 1] + b"]")
            except UNREADABLE:
                continue
            self.tail = _behind(text[found.end() :])
            self.columns.add(events)
            return
        self._one_by_one(text[1:], last=True)

    def _one_by_one(self, text: bytes, *, last: bool) -> None:
        """The events of a damaged piece, each for itself."""
        found: list[Event] = []
        starts = [0, *(match.end() for match in self.pieces.boundary.finditer(text))]
        for start, end in itertools.pairwise((*starts, len(text))):
            part = text[start:end].rstrip(b", \t\r\n")
            rest = b""
            if read := read_event(part):
                events, whole = read
                self.columns.odd += not whole
            else:
                events, rest = objects_in(part)
                self.columns.broken += bool(rest) and not (last and end == len(text))
            found += events
        if last:
            self._end(rest)
        self.columns.add(found)

    def _end(self, rest: bytes) -> None:
        """What stands behind the last whole event: the end of the file, as it should be or not."""
        if rest.startswith(b"]"):
            self.tail = _behind(rest[1:])
        elif rest:
            self.columns.cut_off = True
        elif self.pieces.head:  # an array need not be closed: Chrome's format says so
            self.columns.unclosed = True


def _behind(text: bytes) -> dict[str, Any]:
    """The keys behind the events."""
    return _top(b'{"_":0' + text) if text.lstrip()[:1] == b"," else {}


def _top(text: bytes) -> dict[str, Any]:
    """The file's keys beside the events; none where they do not decode."""
    text = text.strip().rstrip(b",")
    for closed in (text + b"}", text):
        if isinstance(found := loose_json(closed), dict):
            return found
    return {}
