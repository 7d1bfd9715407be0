"""The state of a machine at one moment. Every value may be `Unavailable` with its reason; none is ever a made-up 0.

SI units in the names; a share is 0 to 1. The names of the innermost fields differ, so that a table needs no path.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

_T = TypeVar("_T")
Vendor = Literal["NVIDIA", "AMD", "Intel"]


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Stands where a value would, and says why there is none."""

    reason: str


UNREAD = Unavailable("this back end does not read it")
Number = float | Unavailable
Count = int | Unavailable
Words = str | Unavailable
Flag = bool | Unavailable


def known(value: _T | Unavailable) -> _T | None:
    """The value; None where there is none, for those whom the reason does not concern."""
    return None if isinstance(value, Unavailable) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What the GPU does. The first four are what NVML has always counted: that *some* kernel ran, however small; the
    others are GPM's, from Hopper on."""

    gpu_share: Number = UNREAD  # of the time, in which a kernel ran
    memory_controller_share: Number = UNREAD
    encoder_share: Number = UNREAD
    decoder_share: Number = UNREAD
    engine_share: Number = UNREAD  # of the time, in which a kernel ran, under MIG, too
    sm_share: Number = UNREAD  # of the SMs' cycles, with a warp on them
    occupancy_share: Number = UNREAD  # of the warps that there is room for
    tensor_share: Number = UNREAD  # of the tensor cores' cycles
    fp32_share: Number = UNREAD
    fp16_share: Number = UNREAD
    fp64_share: Number = UNREAD
    memory_share: Number = UNREAD  # of the memory's bandwidth
    pcie_sent_bytes_per_s: Number = UNREAD
    pcie_received_bytes_per_s: Number = UNREAD
    nvlink_sent_bytes_per_s: Number = UNREAD
    nvlink_received_bytes_per_s: Number = UNREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    sm_clock_hz: Number = UNREAD
    sm_clock_max_hz: Number = UNREAD
    memory_clock_hz: Number = UNREAD
    memory_clock_max_hz: Number = UNREAD
    performance_state: Count = UNREAD  # 0 is the fastest
    slowed_by: tuple[str, ...] | Unavailable = UNREAD  # in words; empty: nothing holds the clock down


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    power_w: Number = UNREAD
    power_limit_w: Number = UNREAD
    power_default_w: Number = UNREAD
    energy_j: Number = UNREAD  # since the driver was loaded
    temperature_c: Number = UNREAD
    memory_temperature_c: Number = UNREAD
    slowdown_c: Number = UNREAD  # from here on the clock falls
    shutdown_c: Number = UNREAD
    fan_share: Number = UNREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    memory_total_bytes: Count = UNREAD
    memory_used_bytes: Count = UNREAD
    memory_reserved_bytes: Count = UNREAD  # by the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    ecc_enabled: Flag = UNREAD
    ecc_corrected: Count = UNREAD  # since the driver was loaded
    ecc_uncorrected: Count = UNREAD
    ecc_corrected_ever: Count = UNREAD
    ecc_uncorrected_ever: Count = UNREAD
    retired_single_bit: Count = UNREAD  # pages, before Ampere
    retired_double_bit: Count = UNREAD
    retirement_pending: Flag = UNREAD
    remapped_correctable: Count = UNREAD  # rows, from Ampere on
    remapped_uncorrectable: Count = UNREAD
    remap_pending: Flag = UNREAD
    remap_failed: Flag = UNREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    pcie_generation: Count = UNREAD
    pcie_width: Count = UNREAD
    pcie_generation_max: Count = UNREAD  # of the GPU and its slot together
    pcie_width_max: Count = UNREAD
    pcie_replays: Count = UNREAD
    nvlinks: Count = UNREAD
    nvlinks_active: Count = UNREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Who holds memory of a GPU."""

    pid: int
    kind: Literal["compute", "graphics", "mps"] = "compute"
    used_bytes: Count = UNREAD
    command: Words = UNREAD
    container: Words = UNREAD
    is_own: bool = False  # this process itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A part of a GPU that MIG made."""

    mig_uuid: str
    mig_name: Words = UNREAD
    mig_used_bytes: Count = UNREAD
    mig_total_bytes: Count = UNREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """An error that NVIDIA's driver reported by number."""

    number: int
    words: str = ""  # the kernel log's; NVML's events have none
    age_s: Number = Unavailable("NVML's events have no time")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU."""

    index: int
    name: str
    uuid: str = ""
    vendor: Vendor = "NVIDIA"
    bus_id: Words = UNREAD
    lost: str = ""  # why the driver does not reach it any more
    activity: Activity = Activity()
    clocks: Clocks = Clocks()
    power: Power = Power()
    memory: Memory = Memory()
    errors: Errors = Errors()
    link: Link = Link()
    is_mig: Flag = UNREAD
    instances: tuple[Instance, ...] = ()
    processes: tuple[Process, ...] | Unavailable = UNREAD
    xids: tuple[Xid, ...] | Unavailable = UNREAD
    xids_from: str = ""  # which sources were there


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """The share of the last ten seconds in which some (or all) tasks waited for it."""

    cpu_some_share: Number = UNREAD
    memory_some_share: Number = UNREAD
    memory_full_share: Number = UNREAD
    io_some_share: Number = UNREAD
    io_full_share: Number = UNREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine around the GPUs."""

    cpu: str = ""
    cpus: int = 0
    cpu_share: Number = UNREAD
    load_1min: Number = UNREAD
    host_memory_total_bytes: Count = UNREAD
    host_memory_available_bytes: Count = UNREAD
    swap_used_bytes: Count = UNREAD
    disk_total_bytes: Count = UNREAD  # of the file system of the working folder
    disk_free_bytes: Count = UNREAD
    disk_read_bytes_per_s: Number = UNREAD
    disk_write_bytes_per_s: Number = UNREAD
    net_received_bytes_per_s: Number = UNREAD
    net_sent_bytes_per_s: Number = UNREAD
    pressure: Pressure = Pressure()


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions of what must fit together: driver, CUDA, torch."""

    driver: Words = UNREAD
    driver_cuda: Words = UNREAD  # the newest CUDA that the driver runs: 12.8
    torch: Words = UNREAD
    torch_cuda: Words = UNREAD  # that torch was built with


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The machine at one moment."""

    time_s: float  # since 1970
    gpus: tuple[GpuState, ...] = ()
    host: Host = Host()
    versions: Versions = Versions()
    without: tuple[tuple[str, str], ...] = ()  # vendor, why none of its GPUs is seen


def to_json(value: Any) -> Any:
    """Plain data; `from_json` makes the record of it again.

    >>> to_json(Memory(memory_total_bytes=8))["memory_total_bytes"], to_json(Unavailable("no fan"))
    (8, {'unavailable': 'no fan'})
    """
    if isinstance(value, Unavailable):
        return {"unavailable": value.reason}
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [to_json(each) for each in value] if isinstance(value, tuple) else value


def from_json(kind: Any, data: Any) -> Any:
    """The record of that kind; ValueError where the data is of another.

    >>> from_json(Unavailable | int, {"unavailable": "no fan"}), from_json(tuple[Xid, ...], [{"number": 79}])
    (Unavailable(reason='no fan'), (Xid(number=79, words='', age_s=Unavailable(reason="NVML's events have no time")),))
    """
    if isinstance(data, dict) and data.keys() == {"unavailable"}:
        return Unavailable(data["unavailable"])
    options = [each for each in _options(kind) if each is not Unavailable]
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(data, dict):
            return _record(option, data)
        if typing.get_origin(option) is tuple and isinstance(data, list):
            inside = typing.get_args(option)
            kinds = [inside[0]] * len(data) if inside[-1] is ... else list(inside)
            return tuple(from_json(one, each) for one, each in zip(kinds, data, strict=True))
        if _fits(option, data):
            return data
    raise ValueError(f"{data!r} is no {kind}")


def leaves(record: Any) -> Iterator[tuple[str, Any]]:
    """The plain values inside, by name; lists are left out.

    >>> dict(leaves(GpuState(index=0, name="T4", memory=Memory(memory_used_bytes=7))))["memory_used_bytes"]
    7
    """
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Unavailable):
            yield from leaves(value)
        elif field.name == "slowed_by" and isinstance(value, tuple):
            yield field.name, ", ".join(value)
        elif not isinstance(value, tuple):
            yield field.name, value


def _record(kind: Any, data: dict[str, Any]) -> Any:
    types_of = _types(kind)
    if unknown := data.keys() - types_of.keys():
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**{name: from_json(types_of[name], each) for name, each in data.items()})


@functools.cache
def _types(record: Any) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _options(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _fits(kind: Any, data: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return data in typing.get_args(kind)
    if kind is float:
        return isinstance(data, int | float) and not isinstance(data, bool)
    return isinstance(data, bool) if kind is bool else isinstance(data, kind) and not isinstance(data, bool)
