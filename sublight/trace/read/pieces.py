"""A trace file in pieces that end between two events: memory stays small, and damage stays where it is.

A piece ends where one event closes and the next opens. Quotes are escaped inside a JSON string, so the text
`}, {"ph"` cannot occur in one, and no profiler nests an object that starts with "ph", or with a name and "ph".
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from sublight import units
from sublight.errors import BadInput

PIECE_BYTES = 1 << 20
GZIP_BLOCK_BYTES = 1 << 18  # of packed text: it may unpack to a thousand times as much, a piece at a time
FAR_BYTES = 32 << 20  # what may stand before the first event, in one event, and behind the last one
_GZIP = b"\x1f\x8b"
_BLANK = b"\xef\xbb\xbf \t\r\n"
_PHASE = rb'"(?:ph"|name"\s*+:\s*+"[^"\\]*+"\s*+,\s*+"ph")'
_KEYS = rb'"(?:ph|name|cat|pid|tid|ts|dur|args|id)"'
_EVENTS = re.compile(rb'"traceEvents"\s*+:\s*+\[')


@dataclass(slots=True, kw_only=True)
class Pieces:
    """The text before the events, the events' text in pieces, and what of the file could not be read."""

    head: bytes  # up to the events' bracket; empty where the file is a plain array
    boundary: re.Pattern[bytes]  # between two events
    blocks: Iterator[bytes]
    rest: bytes  # what of the events is read already
    lost: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[bytes, bool]]:
        """A JSON array of whole events, and False; at last the array that the file ends with, its tail, and True."""
        parts, size = [self.rest], len(self.rest)
        for block in self.blocks:
            if cut := _last(self.boundary, block):  # one that lies across two blocks is passed over
                yield b"".join((b"[", *parts, memoryview(block)[: cut.start() + 1], b"]")), False
                parts, size = [block[cut.end() :]], len(block) - cut.end()
                continue
            parts.append(block)
            size += len(block)
            if size > FAR_BYTES:
                self.lost.append(f"No event ends in {units.text(size, 'B')} of text: what follows was not read.")
                break
        yield b"".join((b"[", *parts)), True


def open_pieces(path: Path) -> Pieces:
    """The file's text up to its first event; the rest as it is asked for."""
    lost: list[str] = []
    blocks = _blocks(path, lost)
    text, read = b"", 0
    for block in blocks:
        seen, read = len(text), read + len(block)
        text = text + block if text else block.lstrip(_BLANK)
        if text.startswith(b"["):
            return _pieces(b"", text[1:], blocks, lost)
        if found := _EVENTS.search(text, max(0, seen - 64)):
            return _pieces(text[: found.start()], text[found.end() :], blocks, lost)
        if (text and not text.startswith(b"{")) or read > FAR_BYTES:
            break
    what = "it has no traceEvents" if text else "it is empty" if not read else "it is blank"
    damage = f" ({lost[0].rstrip('.')})" if lost else ""
    raise BadInput(
        f"{path} is not a PyTorch trace: {what}{damage}; make one with `sublight explain script.py --trace FILE`"
    )


def _pieces(head: bytes, rest: bytes, blocks: Iterator[bytes], lost: list[str]) -> Pieces:
    sample = rest[: 1 << 16]
    key = _PHASE if re.search(rb"\}\s*+,\s*+\{\s*+" + _PHASE, sample) else _KEYS
    boundary = re.compile(rb"\}\s*+,\s*+(?=\{\s*+" + key + rb")")
    return Pieces(head=head, boundary=boundary, blocks=blocks, rest=rest, lost=lost)


def _last(boundary: re.Pattern[bytes], text: bytes) -> re.Match[bytes] | None:
    """The last boundary; looked for near the end first."""
    for reach in (1 << 13, 1 << 17, len(text)):
        found = None
        for found in boundary.finditer(text, max(0, len(text) - reach)):  # noqa: B007
            pass
        if found:
            return found
    return None


def _blocks(path: Path, lost: list[str]) -> Iterator[bytes]:
    """The file's bytes, unpacked if they are gzip; what cannot be read ends the file and is said in `lost`."""
    try:
        with path.open("rb") as file:
            first = file.read(len(_GZIP))
            if first == _GZIP:
                yield from _unzipped(first, file, lost)
                return
            while first:
                yield first
                first = file.read(PIECE_BYTES)
    except IsADirectoryError:
        raise BadInput(f"{path} is a folder: name a trace, or a folder of traces with one a rank") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None


def _unzipped(first: bytes, file: IO[bytes], lost: list[str]) -> Iterator[bytes]:
    unzip = zlib.decompressobj(wbits=31)
    block, done = first + file.read(GZIP_BLOCK_BYTES), 0
    while block:
        if unzip.eof:  # another gzip member may follow: what `cat a.gz b.gz` makes
            block = block.lstrip(b"\0")  # padding
            if len(block) < len(_GZIP):
                block += file.read(GZIP_BLOCK_BYTES)
            if not block.strip(b"\0"):
                block = file.read(GZIP_BLOCK_BYTES)
                continue
            if not block.startswith(_GZIP):
                lost.append(f"Something else than gzip data follows after {units.text(done, 'B')} of unpacked text.")
                return
            unzip = zlib.decompressobj(wbits=31)
        before = unzip.copy()
        try:
            text = unzip.decompress(block, PIECE_BYTES)
        except zlib.error as error:
            reason = str(error).rpartition(": ")[2]
            text = _up_to_damage(before, block)
            done += len(text)
            lost.append(f"The gzip data is damaged ({reason}): read up to {units.text(done, 'B')} of unpacked text.")
            yield text
            return
        done += len(text)
        if text:
            yield text
        block = unzip.unused_data if unzip.eof else unzip.unconsumed_tail
        if len(block) < GZIP_BLOCK_BYTES:
            block += file.read(GZIP_BLOCK_BYTES)
    if not unzip.eof:
        lost.append(f"The gzip file ends early: read up to {units.text(done, 'B')} of unpacked text.")


def _up_to_damage(unzip: Any, block: bytes) -> bytes:
    """What of a block can be unpacked before it fails."""
    found = []
    try:
        for at in range(0, len(block), 64):
            found.append(unzip.decompress(block[at : at + 64], PIECE_BYTES))
    except zlib.error:
        pass
    return b"".join(found)[:PIECE_BYTES]
