"""What a Chrome trace's event says beside its time, from the text of its arguments to a Detail; and its devices.

Equal texts make equal details, so each is decoded once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from sublight.trace.read.chrome_events import MOST_DIGITS, UNREADABLE, number, word
from sublight.trace.record import EMPTY, NONE, Detail, Device

# What makes two details equal is the text of these arguments; most events have only some. Their number tells which.
OP_TEXTS = ("dims", "types", "strides", "concrete")
KERNEL_TEXTS = ("grid", "block", "registers", "shared", "collective")
RARE_TEXTS = ("stack", "module", "collective")
TEXTS = (
    *OP_TEXTS, *KERNEL_TEXTS, "old_dims", "stack", "module", "in_elements", "out_elements", "dtype", "group_size",
)  # fmt: skip
LAYOUTS = {len(texts): texts for texts in (OP_TEXTS, KERNEL_TEXTS, TEXTS)}
BETWEEN = b"\0"  # no JSON holds it
_Size = Annotated[int, msgspec.Meta(gt=-(10**MOST_DIGITS), lt=10**MOST_DIGITS)]
_decode_shapes = msgspec.json.Decoder(tuple[tuple[_Size, ...], ...]).decode
_decode_words = msgspec.json.Decoder(tuple[str, ...]).decode


def detail_record(key: bytes) -> Detail:
    parts = key.split(BETWEEN)
    if not any(parts) or len(parts) not in LAYOUTS:
        return EMPTY
    texts = dict(zip(LAYOUTS[len(parts)], parts, strict=True))
    given: dict[str, Any] = {}
    if dims := texts.get("dims") or texts.get("old_dims"):
        given.update(dims=_tuples(dims), types=_words(texts["types"]), strides=_tuples(texts["strides"]))
        given["concrete"] = _words(texts["concrete"])
    if grid := texts.get("grid"):
        given.update(grid=_shape(grid), block=_shape(texts["block"]))
        given.update(registers=_count(texts["registers"]), shared_bytes=_count(texts["shared"]))
    for name in ("stack", "module"):
        if text := texts.get(name):
            given[name] = word(_value(text))
    if (text := texts.get("collective")) and (named := word(_value(text))):
        given["collective"] = _collective(named, texts)
    return Detail(**given) if any(given.values()) else EMPTY


def _collective(named: str, texts: Mapping[str, bytes]) -> dict[str, Any]:
    return {
        "name": word(named),
        "in_elements": _count(texts.get("in_elements", b"")),
        "out_elements": _count(texts.get("out_elements", b"")),
        "dtype": word(_value(texts.get("dtype", b""))),
        "group_size": _count(texts.get("group_size", b"")),
    }


def _value(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text) if text else None
    except UNREADABLE:
        return None


def _values(text: bytes) -> list[Any]:
    found = _value(text)
    return found if isinstance(found, list) else []


def _count(text: bytes) -> int:
    return int(min(max(number(_value(text), NONE), NONE), 2.0**62))


def _shape(text: bytes) -> tuple[int, ...]:
    return tuple(size for size in _values(text) if _is_size(size))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**MOST_DIGITS


@functools.lru_cache(maxsize=1024)
def _words(text: bytes) -> tuple[str, ...]:
    try:
        return _decode_words(text) if text else ()
    except UNREADABLE:
        return tuple(part if isinstance(part, str) else "" for part in _values(text))


@functools.lru_cache(maxsize=1024)
def _tuples(text: bytes) -> tuple[Any, ...]:
    """By argument its shape, or for a list of tensors a tuple of shapes; () where it is neither."""
    try:
        return _decode_shapes(text) if text else ()
    except UNREADABLE:
        pass

    def shape(value: Any) -> Any:
        if not isinstance(value, list):
            return ()
        if all(map(_is_size, value)):
            return tuple(value)
        return tuple(tuple(part) if isinstance(part, list) and all(map(_is_size, part)) else () for part in value)

    return tuple(shape(value) for value in _values(text))


def small(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**31 else None


def devices_of(properties: Any) -> list[Device]:
    rows = [row for row in properties if isinstance(row, dict)] if isinstance(properties, list) else []
    return [
        Device(
            index=small(row.get("id")) or 0,
            name=word(row.get("name")),
            sms=small(row.get("numSms")) or None,
            memory_bytes=int(size) if (size := number(row.get("totalGlobalMem"), 0)) > 0 else None,
            compute_capability=_capability(row),
        )
        for row in rows
    ]


def _capability(row: Mapping[str, Any]) -> tuple[int, int] | None:
    major, minor = small(row.get("computeMajor")), small(row.get("computeMinor"))
    return (major, minor) if major is not None and minor is not None else None
