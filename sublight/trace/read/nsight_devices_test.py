"""Which of CUDA's devices an event of a Nsight report ran on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublight.trace.read.nsight_test import KERNEL, PID, Row, kernel, only, write
from sublight.trace.record import Device

GPU_INFO = (
    '{"Gpus":[{"Id":0,"Name":"NVIDIA L4","TotalMemory":"23000000000","SmCount":58,"CuDevice":0,'
    '"ComputeMajor":8,"ComputeMinor":9,"IsDiscrete":true}]}'
)


@pytest.mark.parametrize(
    ("table", "row", "device"),
    [
        ("Other", {"id": 0}, Device(index=0, name="")),
        (
            "TARGET_INFO_CUDA_DEVICE",
            {"gpuId": 0, "cudaId": 0, "pid": PID, "numMultiprocessors": 68},
            Device(index=0, name="", sms=68),
        ),
        (
            "TARGET_INFO_CUDA_GPU",  # as in early 2021
            {"deviceId": 0, "name": "A100", "numMultiprocessors": 108, "computeCapabilityMajor": 8,
             "computeCapabilityMinor": 0},
            Device(index=0, name="A100", sms=108, compute_capability=(8, 0)),
        ),
        (
            "TARGET_INFO_SYSTEM_ENV",
            {"name": "GpuInfo", "value": GPU_INFO},
            Device(index=0, name="NVIDIA L4", sms=58, memory_bytes=23_000_000_000, compute_capability=(8, 9)),
        ),
        ("TARGET_INFO_SYSTEM_ENV", {"name": "GpuInfo", "value": "{}"}, Device(index=0, name="")),
        ("TARGET_INFO_SYSTEM_ENV", {"name": "GpuInfo", "value": '{"Gpus": 3'}, Device(index=0, name="")),
        ("TARGET_INFO_GPU", {"id": 0, "name": None}, Device(index=0, name="")),
    ],
)  # fmt: skip
def test_devices_come_from_the_table_that_has_them(tmp_path: Path, table: str, row: Row, device: Device) -> None:
    assert only(write(tmp_path / "a.sqlite", {KERNEL: [kernel(5, 6)], table: [row]})).devices == (device,)


def test_the_reports_number_of_a_gpu_is_not_cudas(tmp_path: Path) -> None:
    gpus = [{"id": at, "name": name, "cuDevice": at} for at, name in enumerate(["idle", "busy"])]
    seen = [{"gpuId": 1, "cudaId": 0, "pid": PID}]  # CUDA_VISIBLE_DEVICES=1
    tables = {KERNEL: [kernel(5, 6)], "TARGET_INFO_GPU": gpus, "TARGET_INFO_CUDA_DEVICE": seen}
    assert [device.name for device in only(write(tmp_path / "a.sqlite", tables)).devices] == ["busy"]
