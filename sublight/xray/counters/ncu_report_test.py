"""Reports made here, byte by byte, as NVIDIA's guide lays them out: no report of a real run is at hand."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.xray.counters import ncu_report
from sublight.xray.counters.ncu_csv_test import WIDE

STRINGS = ["", "gpu__time_duration.sum", "launch__registers_per_thread", "device__attribute_display_name",
           "sm__warps_active.avg.pct_of_peak_sustained_active", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
           "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", "device__attribute_compute_capability_major",
           "device__attribute_compute_capability_minor", "launch__func_cache_config"]  # fmt: skip


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number: int, value: int | float | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    body = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(body)) + body


def sized(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def metric(name: str, value: int | float | str) -> bytes:
    at = {int: 5, float: 3, str: 1}[type(value)]
    return field(13, field(1, STRINGS.index(name)) + field(2, field(at, value)))


def single(name: str, value: float) -> bytes:
    inner = varint(2 << 3 | 5) + struct.pack("<f", value)
    return field(13, field(1, STRINGS.index(name)) + field(2, inner))


def launch(name: str, *metrics: bytes, blocks: int = 300) -> bytes:
    three = field(1, blocks) + field(2, 2) + field(3, 1)
    threads = field(1, 128) + field(2, 1) + field(3, 1)
    return (
        field(6, name) + field(7, f"void {name}<int>(int*)") + field(10, three) + field(11, threads) + b"".join(metrics)
    )


def block(*results: bytes, sources: tuple[bytes, ...] = (b"cubin",), strings: list[str] | None = STRINGS) -> bytes:
    payload = b"".join(map(sized, (*sources, *results)))
    table = b"" if strings is None else field(4, b"".join(field(1, word) for word in strings))
    header = field(1, len(sources)) + field(2, len(results)) + table + field(5, len(payload))
    return sized(header) + payload


def report(*blocks: bytes) -> bytes:
    return ncu_report.MAGIC + sized(field(1, 7)) + b"".join(blocks)


SOFTMAX = launch(
    "softmax",
    metric("gpu__time_duration.sum", 12_288),
    metric("launch__registers_per_thread", 40),
    metric("device__attribute_display_name", "NVIDIA H100"),
    metric("device__attribute_compute_capability_major", 9),
    metric("device__attribute_compute_capability_minor", 0),
    metric("sm__warps_active.avg.pct_of_peak_sustained_active", 62.5),
    metric("launch__func_cache_config", "CachePreferNone"),
    metric("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", 2**40),
    single("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", 2.0**36),
)
ADD = launch("add", metric("gpu__time_duration.sum", 5), blocks=7)


@pytest.fixture
def without_ncu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu_report.shutil, "which", lambda name: None)


def read(tmp_path: Path, data: bytes) -> list[ncu_report.Counters]:
    file = tmp_path / "my report.ncu-rep"
    file.write_bytes(data)
    return ncu_report.read(file)


def test_blocks_without_strings_use_those_before(tmp_path: Path) -> None:
    blocks = (block(SOFTMAX), block(ADD, sources=(), strings=[]), block(ADD, sources=(), strings=None))
    softmax, add, again = read(tmp_path, report(*blocks))
    assert again == add
    assert softmax.name == "softmax" and softmax.kernel == "void softmax<int>(int*)"
    assert softmax.grid == (300, 2, 1) and softmax.block == (128, 1, 1)
    assert softmax.gpu == "NVIDIA H100" and softmax.capability == 90
    assert softmax.duration_s == pytest.approx(12.288e-6) and softmax.registers == 40
    assert softmax.occupancy == 0.625 and softmax.sectors_per_load == 16
    assert add.name == "add" and add.grid[0] == 7 and add.duration_s == pytest.approx(5e-9)


def test_several_results_in_one_block(tmp_path: Path) -> None:
    assert [row.name for row in read(tmp_path, report(block(SOFTMAX, ADD, sources=())))] == ["softmax", "add"]


@pytest.mark.usefixtures("without_ncu")
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (report(block(SOFTMAX))[:-3], "cut short"),
        (report(block(SOFTMAX, strings=["", "gpu__time_duration.sum"])), "no name has the number 2"),
        (report(block(SOFTMAX, strings=[f"word {at}" for at in range(len(STRINGS))])), "do not name metrics"),
        (ncu_report.MAGIC + sized(field(1, 9)) + sized(b"\x0b\x01"), "wire type 3"),
        (ncu_report.ZSTD_MAGIC + bytes(9), "compressed"),
    ],
)
def test_another_layout_names_the_command_to_run(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(BadInput, match=why) as caught:
        read(tmp_path, data)
    assert f"ncu --import '{tmp_path}/my report.ncu-rep' --csv --page raw > 'my report.csv'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_layout_is_read_by_ncu_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table.csv").write_text(WIDE)
    ncu = tmp_path / "ncu"
    ncu.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\ncat {tmp_path}/table.csv\n')
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [row.name for row in read(tmp_path, report(block(SOFTMAX))[:-3])] == ["transpose", "_add_kernel"]
    assert (tmp_path / "words").read_text().strip() == f"--import {tmp_path}/my report.ncu-rep --csv --page raw"
    ncu.write_text("#!/bin/sh\necho '==ERROR== broken file'\nexit 1\n")
    with pytest.raises(BadInput, match="ncu says: ==ERROR== broken file"):
        read(tmp_path, report(block(SOFTMAX))[:-3])


def test_a_csv_file_by_any_name(tmp_path: Path) -> None:
    assert [row.name for row in read(tmp_path, WIDE.encode())] == ["transpose", "_add_kernel"]


def test_an_empty_report_and_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no kernel"):
        read(tmp_path, report(block(sources=(b"cubin",))))
    with pytest.raises(BadInput, match="cannot read"):
        ncu_report.read(tmp_path / "none.ncu-rep")
