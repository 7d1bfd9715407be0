"""One event of a Chrome trace: as a typed struct where the text is good, else as much of it as can be understood."""

from __future__ import annotations

import functools
import json
import math
import operator
import re
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from sublight.trace.record import NONE

Raw = msgspec.Raw
NOTHING = Raw()  # an argument that is not there
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
MOST_DIGITS = 18  # of an integer that surely fits in an int64
_BARE_WORD = re.compile(rb"([:\[,]\s*+)[+-]?(?:nan|inf(?:inity)?)(?=\s*+[,}\]])", re.IGNORECASE)
_GAP = re.compile(r"[\s,]*")
_LATE_COMMA = re.compile(rb",(\s*+[}\]])")


def _named(name: str, default: Any = NOTHING) -> Any:
    return msgspec.field(default=default, name=name)


class Args(msgspec.Struct, gc=False):
    """In the order in which Kineto writes them: the decoder looks for the next key behind the last one.

    What only a `Detail` needs stays text: equal texts are decoded once.
    """

    external: int = _named("External id", NONE)
    sequence: int = _named("Sequence number", NONE)
    concrete: Raw = _named("Concrete Inputs")
    types: Raw = _named("Input type")
    strides: Raw = _named("Input Strides")
    dims: Raw = _named("Input Dims")
    device: int | str = NONE
    stream: int | str = NONE
    correlation: int = NONE
    bytes: float = NONE
    registers: Raw = _named("registers per thread")
    shared: Raw = _named("shared memory")
    grid: Raw = NOTHING
    block: Raw = NOTHING
    graph_node: int = _named("graph node id", NONE)
    old_external: int = _named("external id", NONE)
    old_dims: Raw = _named("Input dims")
    stack: Raw = _named("Call stack")
    module: Raw = _named("Module Hierarchy")
    collective: Raw = _named("Collective name")
    in_elements: Raw = _named("In msg nelems")
    out_elements: Raw = _named("Out msg nelems")
    dtype: Raw = NOTHING
    group_size: Raw = _named("Group size")


class Span(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A phase is a type, so that what the others say is not even looked at."""

    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = math.nan
    dur: float = 0.0
    args: Args | None = None


class Begin(Span, gc=False, tag_field="ph", tag="B"):
    """A span whose end comes as an event of its own."""


class End(msgspec.Struct, gc=False, tag_field="ph", tag="E"):
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = math.nan


class AllocatorArgs(msgspec.Struct, gc=False):
    delta: float = _named("Bytes", 0.0)
    total: float = _named("Total Allocated", NONE)
    reserved: float = _named("Total Reserved", NONE)
    address: int = _named("Addr", NONE)
    device_type: int = _named("Device Type", 0)  # 0 is the host
    device: int = _named("Device Id", NONE)


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """An allocator's event, or a mark."""

    name: str = ""
    ts: float = math.nan
    args: AllocatorArgs | None = None


class Names(msgspec.Struct, gc=False):
    name: str = ""


class Label(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """The name of a thread or a process."""

    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    args: Names | None = None


Event = Span | Begin | End | Instant | Label
_UNUSED = tuple(  # flows, counters, marks
    msgspec.defstruct(f"Phase{ord(phase)}", [], gc=False, tag_field="ph", tag=phase)
    for phase in ("s", "t", "f", "C", "b", "n", "e", "S", "T", "p", "F", "N", "O", "D", "P", "R", "c", "I", "v", "V")
)
NO_ARGS = Args()
_ANY = functools.reduce(operator.or_, (*_UNUSED, Event))
decode_events: Callable[[bytes], list[Any]] = msgspec.json.Decoder(list[_ANY], strict=False).decode  # type: ignore[valid-type]
_decode_event: Callable[[bytes], Any] = msgspec.json.Decoder(_ANY, strict=False).decode
_TYPES: dict[str, Any] = {"X": Span, "B": Begin, "E": End, "i": Instant, "I": Instant, "M": Label}


def read_event(text: bytes) -> tuple[list[Event], bool] | None:
    """The event, if it is one that is used, from text that may be damaged, and whether all of it was understood."""
    try:
        return [_decode_event(text)], True
    except UNREADABLE:
        pass
    found = loose_json(text)
    if not isinstance(found, dict):
        return None
    event = _understood(found)
    return ([event], False) if event is not None else ([], True)


def loose_json(text: bytes) -> Any:
    """JSON as it should not be written: NaN, inf, commas before a bracket, bytes that are no UTF-8; None if worse."""
    try:
        return json.loads(_tidy(text).decode("utf-8", "replace"), strict=False)
    except (ValueError, RecursionError):
        return None


def _tidy(text: bytes) -> bytes:
    return _LATE_COMMA.sub(rb"\1", _BARE_WORD.sub(rb"\1null", text))


def objects_in(text: bytes) -> tuple[list[Event], bytes]:
    """The events that stand one after the other at the front, and the text where something else begins."""
    words, at = _tidy(text).decode("utf-8", "replace"), 0
    found: list[Event] = []
    decoder = json.JSONDecoder(strict=False)
    while True:
        at = _GAP.match(words, at).end()  # type: ignore[union-attr]  # it matches nothing as well
        try:
            value, at = decoder.raw_decode(words, at)
        except (ValueError, RecursionError):
            return found, words[at:].encode("utf-8", "replace")
        if isinstance(value, dict) and (event := _understood(value)) is not None:
            found.append(event)


def _understood(fields: dict[str, Any]) -> Event | None:
    """Each field that has the right type, or can be made to have it; None for a phase that is not used."""
    phase = fields.get("ph")
    kind = _TYPES.get(phase) if isinstance(phase, str) else None
    return _filled(kind, fields) if kind is not None else None


def _filled(kind: Any, fields: dict[str, Any]) -> Any:
    made = kind()
    for field in msgspec.structs.fields(kind):
        if field.encode_name in fields:
            value = fields[field.encode_name]
            if (fit := _fitted(field.name, field.type, value)) is not msgspec.UNSET:
                setattr(made, field.name, fit)
            elif field.name == "dur":
                made.dur = math.nan  # it had one, which cannot be read: not the same as none
    return made


def _fitted(name: str, kind: Any, value: Any) -> Any:
    if name == "args":
        return _filled(typing.get_args(kind)[0], value) if isinstance(value, dict) else None
    if kind is Raw:
        try:
            return Raw(json.dumps(value).encode())
        except (ValueError, RecursionError):
            return msgspec.UNSET
    if kind is float:
        return number(value, math.nan) if name in ("ts", "dur") else number(value, NONE)
    if kind is int:
        return int(whole) if abs(whole := number(value, NONE)) < 10**MOST_DIGITS else NONE
    if isinstance(value, str):
        return word(value)
    if int not in typing.get_args(kind) or isinstance(value, bool):
        return msgspec.UNSET
    return int(whole) if abs(whole := number(value, math.inf)) < 10**MOST_DIGITS else msgspec.UNSET


def word(value: Any) -> str:
    """Text that can be written anywhere: half of a surrogate pair cannot."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def number(value: Any, otherwise: float) -> float:
    """
    >>> number("12.5", -1), number(None, -1), number(True, -1), number(10**400, -1)
    (12.5, -1, -1, -1)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return otherwise
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return otherwise
    return found if math.isfinite(found) else otherwise
