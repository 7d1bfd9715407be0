"""Nsight Systems' SQLite tables become the rows of a trace, in every schema that is known."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sublight.errors import BadInput
from sublight.trace.read import nsight
from sublight.trace.record import NONE, Device, Kind, Lane, Trace

MACHINE = 1 << 48  # the upper bits of every global id
PID, TID = 91_186, 91_200
STRINGS = {
    1: "cudaLaunchKernel_v7000",
    2: "void gemm<128>(float*)",
    3: "gemm",
    4: "cudaStreamGetCaptureInfo_v2_v11030",
    5: "pt_main",
    6: "a range by id",
    7: "CUPTI Buffer flush",
    8: "cuMemAlloc_v2",
    9: "cudaGraphLaunch_v10000",
}
RUNTIME, KERNEL = "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY, MEMSET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
SYNC, GRAPH = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
Row = dict[str, Any]
Tables = dict[str, Sequence[Row]]


def global_id(pid: int, tid: int = 0) -> int:
    return MACHINE | pid << 24 | tid


def write(path: Path, tables: Tables) -> Path:
    """A database of these rows; a table's columns are those of its first row."""
    connection = sqlite3.connect(path)
    for table, rows in {"StringIds": [{"id": key, "value": text} for key, text in STRINGS.items()], **tables}.items():
        names = list(rows[0])
        columns = ", ".join(f'"{name}"' for name in names)
        connection.execute(f"CREATE TABLE {table} ({columns})")
        marks = ", ".join("?" * len(names))
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", [[row[name] for name in names] for row in rows])
    connection.commit()
    connection.close()
    return path


def call(start: int, end: int, correlation: int = 0, name: int = 1, pid: int = PID) -> Row:
    return {
        "start": start, "end": end, "eventClass": 0, "globalTid": global_id(pid, TID), "correlationId": correlation,
        "nameId": name,
    }  # fmt: skip


def work(start: int, end: int, correlation: int = 0, pid: int = PID, device: int = 0, **more: Any) -> Row:
    return {
        "start": start, "end": end, "deviceId": device, "contextId": 1 + device, "streamId": 7,
        "correlationId": correlation, "globalPid": global_id(pid), **more,
    }  # fmt: skip


def kernel(start: int, end: int, correlation: int = 0, pid: int = PID, device: int = 0, **more: Any) -> Row:
    sizes = {"gridX": 4, "gridY": 2, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1}
    shared = {"registersPerThread": 40, "staticSharedMemory": 16, "dynamicSharedMemory": 1024, "graphNodeId": None}
    names = {"demangledName": 2, "shortName": 3}
    return work(start, end, correlation, pid, device, **{**names, **sizes, **shared, **more})


def span(start: int | None, end: int | None, text: str | None, kind: int = 59, **more: Any) -> Row:
    row = {"start": start, "end": end, "eventType": kind, "text": text, "globalTid": global_id(PID, TID)}
    return {**row, "textId": None, "domainId": 0, **more}


def rows(trace: Trace) -> list[tuple[str, str, int, int]]:
    columns = zip(trace.kind, trace.name, trace.start_ns, trace.end_ns, strict=True)
    return [(Kind(kind).name, trace.names[name], int(start), int(end)) for kind, name, start, end in columns]


def only(path: Path) -> Trace:
    (trace,) = nsight.load(path)
    return trace


@pytest.fixture
def whole(tmp_path: Path) -> Trace:
    """One process, as a recent version exports it."""
    return only(
        write(
            tmp_path / "run.sqlite",
            {
                RUNTIME: [call(1_300, 1_320, 11), call(1_400, 1_410, 12, name=4), call(1_500, 1_510, 13, name=8)],
                KERNEL: [kernel(1_330, 1_390, 11), kernel(1_395, 1_399, 12, graphNodeId=77, gridX=9)],
                MEMCPY: [work(1_600, 1_700, 13, bytes=4096, copyKind=1, srcKind=0, dstKind=2, graphNodeId=None)],
                MEMSET: [work(1_710, 1_720, 14, bytes=64, value=0, memKind=2)],
                SYNC: [work(1_720, 1_730, 15, syncType=3)],
                "NVTX_EVENTS": [
                    span(1_295, 1_325, "aten::mm, seq = 5, op_id = 12, sizes = [[2, 3], [3, 4]]"),
                    span(1_290, 1_900, "forward"),
                    span(1_200, None, "a mark", kind=34),
                    span(1_291, 1_292, None, kind=60, textId=6),
                ],
                "PROFILER_OVERHEAD": [
                    {"start": 1_800, "end": 1_850, "globalTid": global_id(PID, 4), "nameId": 7, "correlationId": 11}
                ],
                "PROCESSES": [{"globalPid": global_id(PID), "pid": PID, "name": "/usr/bin/python3"}],
                "ThreadNames": [{"nameId": 5, "priority": 20, "globalTid": global_id(PID, TID)}],
                "TARGET_INFO_GPU": [
                    {"id": 3, "name": "NVIDIA H200", "smCount": 132, "totalMemory": 150_000_000_000, "cuDevice": 0,
                     "computeMajor": 9, "computeMinor": 0}
                ],
                "TARGET_INFO_CUDA_DEVICE": [{"gpuId": 3, "cudaId": 0, "pid": PID, "numMultiprocessors": 132}],
            },
        )
    )  # fmt: skip


def test_every_table_becomes_rows_in_order_of_start(whole: Trace) -> None:
    assert rows(whole) == [
        ("RANGE", "forward", 0, 610),
        ("RANGE", "a range by id", 1, 2),
        ("OP", "aten::mm", 5, 35),
        ("RUNTIME", "cudaLaunchKernel", 10, 30),
        ("KERNEL", "void gemm<128>(float*)", 40, 100),
        ("KERNEL", "void gemm<128>(float*)", 105, 109),
        ("RUNTIME", "cudaStreamGetCaptureInfo_v2", 110, 120),
        ("RUNTIME", "cuMemAlloc_v2", 210, 220),
        ("MEMCPY", "Memcpy HtoD (Pageable -> Device)", 310, 410),
        ("MEMSET", "Memset (Device)", 420, 430),
        ("SYNC", "Stream Sync", 430, 440),
        ("OVERHEAD", "CUPTI Buffer flush", 510, 560),
    ]
    assert (whole.tool, whole.base_ns, whole.lost) == ("nsight", 1_290, ())
    assert (whole.rank, whole.world_size) == (None, None)
    assert whole.meta == {"pid": PID, "process": "python3"}


def test_numbers_stand_in_their_columns(whole: Trace) -> None:
    assert whole.correlation.tolist() == [NONE, NONE, NONE, 11, 11, 12, 12, 13, 13, 14, 15, NONE]
    assert whole.graph_node[whole.of_kind(Kind.KERNEL)].tolist() == [NONE, 77]
    assert whole.bytes[whole.of_kind(Kind.MEMCPY, Kind.MEMSET)].tolist() == [4096, 64]
    assert whole.sequence[whole.of_kind(Kind.OP)].tolist() == [5]
    assert set(whole.external.tolist()) == {NONE}
    op, first, second = (whole.detail_of(row) for row in (2, 4, 5))
    assert op.dims == ((2, 3), (3, 4))
    assert (first.grid, first.block, first.registers, first.shared_bytes) == ((4, 2, 1), (128, 1, 1), 40, 1040)
    assert second.grid == (9, 2, 1)
    assert whole.detail_of(0) == whole.details[0]


def test_lanes_are_threads_and_streams(whole: Trace) -> None:
    thread = Lane(kind="thread", process=f"python3 {PID}", number=str(TID), label="pt_main")
    assert whole.lane_of(0) == whole.lane_of(2) == whole.lane_of(3) == thread
    assert whole.lane_of(11) == Lane(kind="thread", process=f"python3 {PID}", number="4")
    assert {whole.lane_of(row) for row in (4, 8, 9, 10)} == {Lane(kind="stream", process="GPU 0", number="7", device=0)}
    assert whole.parents[3] == 2  # the launch is inside the op


def test_the_device_is_described(whole: Trace) -> None:
    assert whole.devices == (
        Device(index=0, name="NVIDIA H200", sms=132, memory_bytes=150_000_000_000, compute_capability=(9, 0)),
    )


def test_an_old_schema_with_few_columns(tmp_path: Path) -> None:
    """No enumerations, no demangled names, no event types, 0 for what is missing."""
    trace = only(
        write(
            tmp_path / "old.sqlite",
            {
                KERNEL: [{"start": 10, "end": 20, "deviceId": 1, "streamId": 3, "correlationId": 0, "shortName": 3}],
                MEMCPY: [{"start": 30, "end": 40, "copyKind": 10, "srcKind": 2, "dstKind": 2}],
                MEMSET: [{"start": 50, "end": 60}],
                "NVTX_EVENTS": [{"start": 1, "end": 70, "text": "step"}, {"start": 2, "end": None, "text": "a mark"}],
            },
        )
    )
    assert rows(trace) == [
        ("RANGE", "step", 0, 69),
        ("KERNEL", "gemm", 9, 19),
        ("MEMCPY", "Memcpy PtoP (Device -> Device)", 29, 39),
        ("MEMSET", "Memset (Unknown)", 49, 59),
    ]
    assert trace.correlation.tolist() == [NONE] * 4
    detail = trace.detail_of(1)
    assert (detail.grid, detail.block, detail.registers, detail.shared_bytes) == ((), (), NONE, NONE)
    assert trace.lane_of(1) == Lane(kind="stream", process="GPU 1", number="3", device=1)
    assert trace.lane_of(2).device == NONE
    assert (trace.devices, trace.lost) == ((Device(index=1, name=""),), ())


COPIES = [
    ((1, 0, 2), "Memcpy HtoD (Pageable -> Device)"),
    ((1, 1, 2), "Memcpy HtoD (Pinned -> Device)"),
    ((2, 2, 1), "Memcpy DtoH (Device -> Pinned)"),
    ((8, 2, 2), "Memcpy DtoD (Device -> Device)"),
    ((10, 2, 2), "Memcpy PtoP (Device -> Device)"),
    ((11, 4, 5), "Memcpy HtoD (Managed -> Device Static)"),
    ((99, None, 7), "Memcpy Unknown (Unknown -> Unknown)"),
]
ENUMS: Tables = {  # other numbers than the known ones: the file's word counts
    "ENUM_CUDA_MEMCPY_OPER": [
        {"id": 41, "name": "CUDA_MEMCPY_KIND_HTOD"},
        {"id": 42, "name": "CUDA_MEMCPY_KIND_UVM_DTOH"},
    ],
    "ENUM_CUDA_MEM_KIND": [
        {"id": 50, "name": "CUDA_MEMOPR_MEMORY_KIND_PAGEABLE"},
        {"id": 51, "name": "CUDA_MEMOPR_MEMORY_KIND_DEVICE_STATIC"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "name", "tables"),
    [
        *((kinds, name, {}) for kinds, name in COPIES),
        ((41, 50, 51), "Memcpy HtoD (Pageable -> Device Static)", ENUMS),
        ((42, 51, 50), "Memcpy DtoH (Device Static -> Pageable)", ENUMS),
        ((8, 2, 2), "Memcpy DtoD (Device -> Device)", ENUMS),
    ],
)
def test_copies_are_named_as_pytorch_names_them(
    tmp_path: Path, kinds: tuple[int, ...], name: str, tables: Tables
) -> None:
    copy, source, target = kinds
    row = work(1, 2, bytes=8, copyKind=copy, srcKind=source, dstKind=target)
    assert only(write(tmp_path / "a.sqlite", {MEMCPY: [row], **tables})).names == (name,)


def test_a_graph_traced_as_a_whole_is_one_kernel(tmp_path: Path) -> None:
    graphs = [work(20, 90, 5, graphId=3, graphExecId=4), work(100, 190, 6, graphId=3, graphExecId=4)]
    calls = [call(10, 15, 5, name=9), call(16, 18, 6, name=9)]
    trace = only(write(tmp_path / "a.sqlite", {GRAPH: graphs, RUNTIME: calls}))
    assert rows(trace)[2:] == [("KERNEL", "CUDA graph 3", 10, 80), ("KERNEL", "CUDA graph 3", 90, 180)]
    assert trace.correlation.tolist() == [5, 6, 5, 6]


def test_a_sync_is_on_the_device_of_its_context(tmp_path: Path) -> None:
    sync = {**work(30, 40, 9, device=1, syncType=1), "deviceId": 0, "streamId": 0xFFFFFFFF}
    trace = only(write(tmp_path / "a.sqlite", {KERNEL: [kernel(10, 20, device=1)], SYNC: [sync]}))
    assert trace.lane_of(1) == Lane(kind="stream", process="GPU 1", number="all", device=1)
    assert [device.index for device in trace.devices] == [1]


def test_two_processes_are_two_ranks_in_order_of_their_devices(tmp_path: Path) -> None:
    launcher = 50
    traces = nsight.load(
        write(
            tmp_path / "a.sqlite",
            {
                RUNTIME: [call(900, 910, pid=launcher), call(1_000, 1_001, 7, pid=201), call(2_000, 2_001, 7, pid=200)],
                KERNEL: [kernel(1_100, 1_200, 7, pid=201, device=0), kernel(2_100, 2_300, 7, pid=200, device=1)],
                "PROFILER_OVERHEAD": [
                    {
                        "start": 1,
                        "end": 2,
                        "globalTid": global_id(60, 60),
                        "nameId": 7,
                    }  # of a process with nothing else
                ],
            },
        )
    )
    assert [(trace.rank, trace.world_size, trace.meta["pid"]) for trace in traces] == [
        (0, 2, 201),
        (1, 2, 200),
        (None, None, launcher),
    ]
    assert [trace.base_ns for trace in traces] == [1_000, 2_000, 900]
    assert [len(trace) for trace in traces] == [2, 2, 1]
    assert [[device.index for device in trace.devices] for trace in traces] == [[0], [1], []]
    assert [lane.device for lane in traces[1].lanes] == [NONE, 1]
    assert traces[0].correlation.tolist() == traces[1].correlation.tolist() == [7, 7]


def test_ranks_that_only_mark_ranges_are_in_order_of_their_process(tmp_path: Path) -> None:
    ranges = [span(10, 20, "step", globalTid=global_id(pid, pid)) for pid in (31, 30)]
    traces = nsight.load(write(tmp_path / "a.sqlite", {"NVTX_EVENTS": ranges}))
    assert [(trace.rank, trace.world_size, trace.meta["pid"]) for trace in traces] == [(0, 2, 30), (1, 2, 31)]


def test_what_has_no_process_goes_to_the_one_that_launched_it(tmp_path: Path) -> None:
    """Correlation 7 was given by both processes, 8 by one alone."""
    calls = [call(10, 11, 7, pid=20), call(10, 11, 7, pid=21), call(12, 13, 8, pid=21), call(14, 15, 9, pid=20)]
    kernels = [{"start": 30 + at, "end": 40, "correlationId": at, "shortName": 3} for at in (7, 8, 9, 10)]
    first, second = sorted(
        nsight.load(write(tmp_path / "a.sqlite", {RUNTIME: calls, KERNEL: kernels})),
        key=lambda trace: trace.meta["pid"],
    )
    assert first.correlation[first.of_kind(Kind.KERNEL)].tolist() == [9]
    assert second.correlation[second.of_kind(Kind.KERNEL)].tolist() == [8]
    assert first.lost == second.lost == ("2 events could be of any of 2 processes.",)


def test_what_has_no_process_goes_to_the_only_one(tmp_path: Path) -> None:
    kernels = [{"start": 30, "end": 40, "correlationId": 5, "shortName": 3}]
    trace = only(write(tmp_path / "a.sqlite", {RUNTIME: [call(10, 11, 7)], KERNEL: kernels}))
    assert len(trace) == 2 and trace.meta["pid"] == PID


def test_rows_without_a_sane_time_are_counted(tmp_path: Path) -> None:
    bad = [(None, 5), (5, None), (9, 8), (-3, 4), ("10", 12), (10.5, 12), (1, 2**62)]
    kernels = [kernel(start, end) for start, end in [(100, 110), *bad]]  # type: ignore[arg-type]
    ranges = [span(100, 120, "whole"), span(101, None, "never ended")]
    trace = only(write(tmp_path / "a.sqlite", {KERNEL: kernels, "NVTX_EVENTS": ranges}))
    assert rows(trace) == [("RANGE", "whole", 0, 20), ("KERNEL", "void gemm<128>(float*)", 0, 10)]
    assert trace.lost == (
        f"{len(bad)} rows of {KERNEL} had no start or no end, or ended before the start.",
        "1 row of NVTX_EVENTS had no start or no end, or ended before the start.",
    )


def test_names_that_are_nowhere_still_tell_events_apart(tmp_path: Path) -> None:
    kernels = [kernel(1, 2, demangledName=888, shortName=None), kernel(3, 4, demangledName=None, shortName=3)]
    trace = only(write(tmp_path / "a.sqlite", {KERNEL: kernels, RUNTIME: [call(5, 6, name=999)]}))
    assert [name for _, name, _, _ in rows(trace)] == ["unnamed kernel 888", "gemm", "unnamed call 999"]


def test_text_that_is_not_utf8_is_kept_as_far_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.sqlite", {"NVTX_EVENTS": [span(1, 2, "x")]})
    connection = sqlite3.connect(path)
    connection.execute("UPDATE NVTX_EVENTS SET text = CAST(x'737465ff70' AS TEXT)")
    connection.commit()
    connection.close()
    assert only(path).names == ("ste\ufffdp",)


@pytest.mark.parametrize("name", ["a b.sqlite", "what?.sqlite", "50%#1.sqlite", "ö.sqlite"])
def test_the_file_is_only_read(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, {KERNEL: [kernel(1, 2)]})
    before = path.read_bytes()
    path.chmod(stat.S_IRUSR)
    assert len(only(path)) == 1
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [name]


def fake_nsys(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program of that name, alone on PATH; `$5` is the file to write and `$6` the report."""
    folder.mkdir()
    script = folder / "nsys"
    script.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)  # it is remembered


def test_a_report_is_exported_and_the_export_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = write(tmp_path / "run.nsys-rep", {KERNEL: [kernel(1, 2)]})  # our nsys copies
    cp = shutil.which("cp")
    fake_nsys(tmp_path / "bin", monkeypatch, f'[ "$1 $2 $3 $4" = "export --type sqlite --output" ] && {cp} "$6" "$5"')
    trace = only(report)
    assert (trace.source, len(trace)) == (str(report), 1)
    assert [file.name for file in (tmp_path / "bin").iterdir()] == ["nsys"]
    exported = nsight.export(report)
    assert exported.name == "run.sqlite" and exported.read_bytes() == report.read_bytes()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("echo working; echo 'report is from the future' >&2; exit 3", "report is from the future"),
        ("exit 3", "exit code 3"),
        ("exit 0", "it wrote no file"),
        ("echo > $5; exit 3", "exit code 3"),
    ],
)
def test_an_export_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"x")
    fake_nsys(tmp_path / "bin", monkeypatch, body)
    with pytest.raises(BadInput, match=f"nsys could not export .*run.nsys-rep: {says}$"):
        nsight.load(report)
    assert [file.name for file in (tmp_path / "bin").iterdir()] == ["nsys"]


def test_without_nsys_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "run.nsys-rep"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="is not a file"):
        nsight.load(report)
    report.write_bytes(b"x")
    with pytest.raises(BadInput, match=r"nsys export --type sqlite run\.nsys-rep"):
        nsight.load(report)
