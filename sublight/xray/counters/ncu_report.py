"""Read a report of Nsight Compute (.ncu-rep) without Nsight Compute.

NVIDIA's Customization Guide describes the file (version 7): the magic number NVR\\0, a header, then blocks; a block is
a header and its entries (binaries, then one result for each launch), each behind its size in four bytes, each a
protocol buffer. We read only what we need: names, sizes, and the metrics with a single value. The layout may change
without notice; where it does not fit, `ncu --import` is asked, if it is here.
"""

from __future__ import annotations

import shlex
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sublight.errors import BadInput
from sublight.xray.counters import ncu_csv
from sublight.xray.counters.record import Counters, counters, knows

MAGIC = b"NVR\0"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"  # .ncu-repz: the same, compressed
TIMEOUT_S = 300

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # protocol buffers' wire types
# field numbers, as NVIDIA's .proto files have them
_NUM_SOURCES, _NUM_RESULTS, _STRING_TABLE, _PAYLOAD_SIZE = 1, 2, 4, 5  # of a block's header
_MANGLED, _FUNCTION, _DEMANGLED, _GRID, _BLOCK, _METRICS = 5, 6, 7, 10, 11, 13  # of a result
_NAME_ID, _VALUE = 1, 2  # of a metric

_Field = int | bytes


class _OtherLayout(ValueError):
    """The file is not laid out as the guide says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A protocol buffer's fields by number, each as often as it came."""

    fields: dict[int, list[_Field]]

    def number(self, at: int) -> int:
        value = self.fields.get(at, [0])[-1]
        if not isinstance(value, int):
            raise _OtherLayout(f"field {at} is no number")
        return value

    def all_bytes(self, at: int) -> list[bytes]:
        values = self.fields.get(at, [])
        if not all(isinstance(value, bytes) for value in values):
            raise _OtherLayout(f"field {at} is no text or message")
        return [value for value in values if isinstance(value, bytes)]

    def text(self, at: int) -> str:
        values = self.all_bytes(at)
        return values[-1].decode("utf-8", "replace") if values else ""


def read(path: Path) -> list[Counters]:
    """The kernels of a report or of a CSV file, told apart by what is in it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    if data.startswith(ZSTD_MAGIC):
        return _by_ncu(path, "it is compressed")
    if not data.startswith(MAGIC):
        return ncu_csv.read(path)
    try:
        kernels = list(_launches(data))
    except (_OtherLayout, struct.error) as error:
        return _by_ncu(path, str(error))
    if not kernels:
        raise BadInput(f"{path} holds no kernel: profile a run that launches one")
    return kernels


def _launches(data: bytes) -> Iterator[Counters]:
    _, at = _sized(data, len(MAGIC), len(data))
    strings: list[str] = []
    while at < len(data):
        head, begin = _sized(data, at, len(data))
        header = message(head)
        at = begin + header.number(_PAYLOAD_SIZE)
        if at > len(data):
            raise _OtherLayout("it is cut short")
        for table in header.all_bytes(_STRING_TABLE):
            # a block that brings no strings of its own uses those before it
            strings = [word.decode("utf-8", "replace") for word in message(table).all_bytes(1)] or strings
        for entry in range(header.number(_NUM_SOURCES) + header.number(_NUM_RESULTS)):
            body, begin = _sized(data, begin, at)
            if entry >= header.number(_NUM_SOURCES):
                yield _launch(message(body), strings)


def _launch(result: Message, strings: list[str]) -> Counters:
    values: dict[str, tuple[float, str]] = {}
    words: dict[str, str | float] = {}
    for body in result.all_bytes(_METRICS):
        metric = message(body)
        name_id = metric.number(_NAME_ID)
        if name_id >= len(strings):
            raise _OtherLayout(f"no name has the number {name_id}")
        for inner in metric.all_bytes(_VALUE)[-1:]:
            value = _metric_value(message(inner))
            words[strings[name_id]] = value
            if isinstance(value, float) and knows(strings[name_id]):
                values[strings[name_id]] = (value, _unit(strings[name_id]))
    if words and not any("__" in name for name in words):
        raise _OtherLayout("its strings do not name metrics")
    major, minor = (words.get(f"device__attribute_compute_capability_{part}") for part in ("major", "minor"))
    return counters(
        result.text(_DEMANGLED) or result.text(_FUNCTION) or result.text(_MANGLED),
        values,
        grid=_three(result, _GRID),
        block=_three(result, _BLOCK),
        gpu=str(words.get("device__attribute_display_name", "")),
        capability=int(10 * major + minor) if isinstance(major, float) and isinstance(minor, float) else None,
    )


def _metric_value(value: Message) -> str | float:
    """One of text, float, double, and two sizes of unsigned numbers."""
    (at, found), *others = [(at, rows[-1]) for at, rows in value.fields.items() if 1 <= at <= 5] or [(0, b"")]
    if others:
        raise _OtherLayout("a metric has two values")
    if isinstance(found, int):
        return float(found)
    if at == 2 and len(found) == 4:
        return float(struct.unpack("<f", found)[0])
    if at == 3 and len(found) == 8:
        return float(struct.unpack("<d", found)[0])
    return found.decode("utf-8", "replace")


def _unit(name: str) -> str:
    """Values lie in base units in the file.

    >>> _unit("gpu__time_duration.sum"), _unit("sm__maximum_warps_per_active_cycle_pct"), _unit("dram__bytes_read.sum")
    ('ns', '%', 'byte')
    """
    if "time_duration" in name:
        return "ns"
    if "pct" in name:
        return "%"
    return "byte" if "bytes" in name or "shared_mem_per_block" in name else ""


def _three(result: Message, at: int) -> tuple[int, ...]:
    messages = [message(body) for body in result.all_bytes(at)]
    return tuple(messages[-1].number(axis) for axis in (1, 2, 3)) if messages else ()


def message(data: bytes) -> Message:
    """Protocol buffers' wire format: a key of number and type, then a value; the meaning is the reader's affair.

    >>> message(b"\\x08\\xac\\x02\\x12\\x02hi").fields
    {1: [300], 2: [b'hi']}
    """
    fields: dict[int, list[_Field]] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value: _Field
        if key & 7 == _VARINT:
            value, at = _varint(data, at)
        elif key & 7 in (_BYTES, _EIGHT_BYTES, _FOUR_BYTES):
            size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(key & 7, 0)
            if not size:
                size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            raise _OtherLayout(f"wire type {key & 7}")
        if at > len(data) or key < 8:
            raise _OtherLayout("a message ends early")
        fields.setdefault(key >> 3, []).append(value)
    return Message(fields=fields)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7
    raise _OtherLayout("a number does not end")


def _sized(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    """What lies behind its size in four bytes, and where it ends."""
    if at + 4 > end:
        raise _OtherLayout("it is cut short")
    (size,) = struct.unpack_from("<I", data, at)
    if at + 4 + size > end:
        raise _OtherLayout("it is cut short")
    return data[at + 4 : at + 4 + size], at + 4 + size


def _by_ncu(path: Path, why: str) -> list[Counters]:
    words = ["ncu", "--import", str(path), "--csv", "--page", "raw"]
    here = shutil.which("ncu")
    if here is None:
        csv_name = shlex.quote(path.stem + ".csv")
        raise BadInput(f"cannot read {path} without ncu ({why}): where ncu is, run `{shlex.join(words)} > {csv_name}`")
    try:
        done = subprocess.run([here, *words[1:]], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"cannot read {path} ({why}), and ncu failed: {error}") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
        raise BadInput(f"cannot read {path} ({why}), and ncu says: {lines[-1]}")
    return ncu_csv.parse(done.stdout, where=str(path))
