"""The GPUs of an Nsight Systems export: which table describes them differs by version, and some describe none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from sublight.trace.read.nsight_database import Database
from sublight.trace.record import NONE, Device

_TABLES = ("TARGET_INFO_GPU", "TARGET_INFO_CUDA_GPU")  # the second: until the middle of 2021
_SMS = ("smCount", "numMultiprocessors")
_MEMORY = ("totalMemory", "globalMemorySize")
_MAJOR = ("computeMajor", "computeCapabilityMajor", "smMajor")
_MINOR = ("computeMinor", "computeCapabilityMinor", "smMinor")
_ID = ("id", "gpuId", "deviceId")
_CUDA = ("cuDevice", "deviceId", "id")


class _Gpu(msgspec.Struct, rename="pascal"):
    """A GPU in the settings of the machine, which are JSON."""

    id: int = NONE
    cu_device: int = NONE
    name: str = ""
    sm_count: int = NONE
    total_memory: int = NONE
    compute_major: int = NONE
    compute_minor: int = NONE


class _GpuInfo(msgspec.Struct, rename="pascal"):
    gpus: list[_Gpu] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """What an export says of its GPUs."""

    by_id: Mapping[int, Device]  # by the report's own number
    by_cuda: Mapping[int, Device]  # by CUDA's number on the machine
    seen_as: Mapping[tuple[int, int], tuple[int, int]]  # (process id, CUDA's number in it): the report's number, SMs

    def device(self, pid: int, index: int) -> Device:
        """What a process calls device `index`; without a name where the export has none."""
        number, sms = self.seen_as.get((pid, index), (NONE, NONE))
        known = self.by_id.get(number) or self.by_cuda.get(index)
        return replace(known, index=index) if known else Device(index=index, name="", sms=_positive(sms))


def describe(database: Database) -> Gpus:
    """From the first table that names a GPU, else from the settings of the machine."""
    seen = database.integers("TARGET_INFO_CUDA_DEVICE", "pid", "cudaId", "gpuId", "numMultiprocessors")
    rows = zip(*(column.tolist() for column in seen.values()), strict=True)
    described = next((found for table in _TABLES if (found := _from_table(database, table))), None)
    if described is None:
        described = _from_settings(database)
    return Gpus(
        by_id={gpu.id: _device(gpu) for gpu in described},
        by_cuda={gpu.cu_device: _device(gpu) for gpu in described},
        seen_as={(pid, cuda): (gpu, sms) for pid, cuda, gpu, sms in rows},
    )


def _device(gpu: _Gpu) -> Device:
    return Device(
        index=gpu.cu_device,
        name=gpu.name,
        sms=_positive(gpu.sm_count),
        memory_bytes=_positive(gpu.total_memory),
        compute_capability=(gpu.compute_major, max(gpu.compute_minor, 0)) if gpu.compute_major > 0 else None,
    )


def _positive(value: int) -> int | None:
    return value if value > 0 else None


def _from_table(database: Database, table: str) -> list[_Gpu]:
    there = database.columns.get(table, frozenset())
    choices = (_ID, _CUDA, _SMS, _MEMORY, _MAJOR, _MINOR)
    columns = [next((name for name in names if name in there), names[0]) for names in choices]
    numbers, texts = database.read(table, columns, ("name",))
    rows = zip(texts["name"], *(numbers[name].tolist() for name in columns), strict=True)
    return [
        _Gpu(id=number, cu_device=cuda, name=name, sm_count=sms, total_memory=memory, compute_major=major,
             compute_minor=minor)
        for name, number, cuda, sms, memory, major, minor in rows
        if name
    ]  # fmt: skip


def _from_settings(database: Database) -> list[_Gpu]:
    where = "WHERE name = 'GpuInfo'" if "name" in database.columns.get("TARGET_INFO_SYSTEM_ENV", ()) else "LIMIT 0"
    _, texts = database.read("TARGET_INFO_SYSTEM_ENV", (), ("value",), where)
    for text in texts["value"]:
        try:  # numbers past 32 bits are written as texts there
            return [gpu for gpu in msgspec.json.decode(text, type=_GpuInfo, strict=False).gpus if gpu.name]
        except msgspec.DecodeError:
            continue
    return []
