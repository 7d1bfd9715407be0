"""Demonstrations against a driver that answers without a GPU: all run through, by calls that libcuda has."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sublight.errors import BadInput
from sublight.extensions import build, driver
from sublight.extensions.demos import (
    DEMOS,
    graphs,
    host_memory,
    jit,
    ncu,
    nvtx,
    occupancy,
    overlap,
    run,
    waiting,
)
from sublight.extensions.demos.demo import Demo, Figures, Record, Span, Table, Timeline, figures_of, read_record
from sublight.extensions.demos.gpu import Gpu, why_no_gpu
from sublight.extensions.demos.graphs import GRAPHS

EXPORTED = frozenset(  # of libcuda.so.1, as the driver of CUDA 13.0 has them
    """cuCtxResetPersistingL2Cache cuCtxSetCurrent cuCtxSetLimit cuCtxSynchronize cuDeviceGet cuDeviceGetAttribute
    cuDeviceGetCount cuDeviceGetName cuDevicePrimaryCtxRetain cuDevicePrimaryCtxSetFlags_v2 cuEventCreate
    cuEventElapsedTime cuEventRecord cuEventSynchronize cuFuncGetName cuFuncSetAttribute cuGraphGetNodes
    cuGraphInstantiateWithFlags cuGraphKernelNodeGetParams_v2 cuGraphLaunch cuGraphNodeGetType cuInit cuKernelGetName
    cuLaunchCooperativeKernel cuLaunchKernel cuMemAllocAsync cuMemAlloc_v2 cuMemFreeAsync cuMemFreeHost cuMemFree_v2
    cuMemHostAlloc cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2 cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemsetD32_v2
    cuModuleGetFunction cuModuleGetGlobal_v2 cuModuleLoadData cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuStreamBeginCapture_v2 cuStreamCreate cuStreamEndCapture cuStreamQuery cuStreamSetAttribute cuStreamSynchronize
    cuStreamWaitEvent cuTexObjectCreate""".split()  # noqa: SIM905
)
ATTRIBUTES = {
    16: 132,
    38: 60 << 20,
    39: 2048,
    75: 9,
    76: 0,
    81: 228 << 10,
    97: 227 << 10,
    108: 40 << 20,
    109: 128 << 20,
}


class Pretended:
    """Answers as an H200 would, in a few numbers; host memory is real, since demonstrations write to it."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in EXPORTED:
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self.called.append(name)
            self.answer(name, *arguments)
            return 0

        return function

    @staticmethod
    def _fill(reference: Any, value: Any) -> None:
        reference._obj.value = value

    def answer(self, name: str, *arguments: Any) -> None:
        if name == "cuDeviceGetAttribute":
            self._fill(arguments[0], ATTRIBUTES[arguments[1]])
        elif name == "cuDeviceGetCount":
            self._fill(arguments[0], 1)
        elif name == "cuEventElapsedTime":
            self._fill(arguments[0], 1.0)
        elif name == "cuOccupancyMaxActiveBlocksPerMultiprocessor":
            shared_bytes = arguments[3].value
            self._fill(arguments[0], min(16, (228 << 10) // (shared_bytes + 1024)))
        elif name == "cuMemHostAlloc":
            self._kept.append(ctypes.create_string_buffer(arguments[1].value))
            self._fill(arguments[0], ctypes.addressof(self._kept[-1]))
        elif name in ("cuMemAlloc_v2", "cuMemAllocAsync", "cuTexObjectCreate"):
            self._fill(arguments[0], 256 * len(self.called))
        elif name == "cuModuleGetGlobal_v2":
            self._fill(arguments[0], 4096)
            self._fill(arguments[1], 16384)
        elif name == "cuMemcpyDtoH_v2":
            ctypes.memset(arguments[0], 1, arguments[2].value)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pretended]:
    made = Pretended()
    image = tmp_path / "kernels.cubin"
    image.write_bytes(b"code")
    monkeypatch.setattr(driver, "_library", lambda: made)
    monkeypatch.setattr(build, "cubin", lambda source, capability: image)
    monkeypatch.setattr(build, "ptx", lambda source, capability: "words")
    monkeypatch.setattr(host_memory, "SIZES", (2**14, 2**18))
    monkeypatch.setattr(overlap, "CHUNK_BYTES", 2**14)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(waiting, "_child", lambda flags: {"wall_s": 0.1, "cpu_s": 0.1, "round_s": 6e-5})
    monkeypatch.setattr(jit, "_in_a_process", lambda path, variables: 0.5)
    monkeypatch.setattr(nvtx, "range_push", lambda name: None)
    monkeypatch.setattr(nvtx, "range_pop", lambda: None)
    yield made


@pytest.mark.parametrize("demo", [demo for demo in DEMOS if demo is not GRAPHS], ids=lambda demo: demo.name)
def test_runs_through(demo: Demo, pretended: Pretended) -> None:
    assert why_no_gpu() == ""
    figures = demo.run(Gpu(demo.source))
    assert figures.tables and all(table.rows for table in figures.tables)
    for table in figures.tables:
        assert all(len(row) == len(table.columns) for row in table.rows), table.title
    assert not set(pretended.called) - EXPORTED
    assert all("ncu" in line or "nsys" in line for line in figures.missing)
    assert figures == figures_of(json.loads(json.dumps(figures.to_json())))


def test_a_call_that_libcuda_lacks_is_an_error(pretended: Pretended) -> None:
    with pytest.raises(AttributeError):
        driver.call("cuMemAlloc_v9")


def test_one_that_fails_costs_only_itself(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *arguments: Any) -> None:
        if name == "cuLaunchKernel":
            raise driver.DriverError("launch: CUDA_ERROR_ILLEGAL_ADDRESS (700)")
        Pretended.answer(pretended, name, *arguments)

    monkeypatch.setattr(pretended, "answer", fail)
    figures = run.on_this_gpu(run.find("blocks"))
    assert figures.missing == ("blocks: DriverError: launch: CUDA_ERROR_ILLEGAL_ADDRESS (700)",)
    assert "no time was left" in run._in_a_process(run.find("blocks"), 0.0).missing[0]


def test_clusters_need_hopper(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTRIBUTES, 75, 8)
    assert "this GPU is sm_80" in run.on_this_gpu(run.find("cluster")).missing[0]


def test_all_within_the_limit(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    now = iter(range(0, 10_000, 20))
    monkeypatch.setattr(run.time, "monotonic", lambda: next(now))

    def pretend(demo: Demo, limit_s: float) -> Figures:
        seen.append(limit_s)
        return Figures()

    monkeypatch.setattr(run, "_in_a_process", pretend)
    assert list(run.run_all(limit_s=150)) == [demo.name for demo in DEMOS]
    assert seen[0] == run.EACH_LIMIT_S and seen[6] == 10 and seen[-1] < 0


def test_no_gpu_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError

    monkeypatch.setattr(driver.ctypes, "CDLL", none)
    driver._library.cache_clear()
    assert "no NVIDIA driver" in why_no_gpu()
    with pytest.raises(BadInput, match="no GPU to run on: no libcuda"):
        run.run_all()


NCU = """==PROF== Connected to process 7
"ID","Kernel Name","sm__maximum_warps_per_active_cycle_pct","sm__warps_active.avg.pct_of_peak_sustained_active",\
"smsp__warps_active.avg.per_cycle_active","smsp__warps_eligible.avg.per_cycle_active",\
"smsp__issue_active.avg.per_cycle_active","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
"","","%","%","warp","warp","inst/cycle","inst","inst"
"0","one_in_flight","25","24.5","3.9","0.1","0.08","45","5"
""".replace("\\\n", "")


def test_counters_become_a_row() -> None:
    table = occupancy.counter_table(ncu.parse(NCU), [("one_in_flight", 4, 0)])
    name, *figures, waits = table.rows[0]
    assert name == "one, 16 warps" and waits == "device memory, L2 (90%)"
    assert figures == pytest.approx([0.25, 0.245, 3.9, 3.8, 0.1, 0.08])
    with pytest.raises(BadInput, match="1 launches of 2"):
        occupancy.counter_table(ncu.parse(NCU), [("one_in_flight", 4, 0), ("four_in_flight", 4, 0)])


def test_ranges_are_projected_on_their_kernels(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "run.sqlite") as data:
        data.executescript(
            """create table NVTX_EVENTS (start, end, text, textId, globalTid);
            create table StringIds (id, value);
            create table CUPTI_ACTIVITY_KIND_RUNTIME (start, end, correlationId, globalTid);
            create table CUPTI_ACTIVITY_KIND_KERNEL (start, end, correlationId);
            insert into NVTX_EVENTS values (0, 100, 'forward', null, 1), (100, 150, null, 4, 1);
            insert into StringIds values (4, 'backward');
            insert into CUPTI_ACTIVITY_KIND_RUNTIME values
                (10, 20, 1, 1), (30, 40, 2, 1), (110, 120, 3, 1), (10, 20, 4, 2);
            insert into CUPTI_ACTIVITY_KIND_KERNEL values
                (1000, 2000, 1), (2000, 5000, 2), (6000, 7000, 3), (0, 9000, 4);
            """
        )
    assert nvtx.projected(tmp_path / "run.sqlite").rows == (
        ("forward", 2, 100 / 1e9, 4000 / 1e9),
        ("backward", 1, 50 / 1e9, 1000 / 1e9),
    )


def test_graphs_hold_and_forget() -> None:
    """TorchScript keeps the branch it saw; dynamo notices the other."""
    contents, changes, times = graphs.tables("cpu")
    assert [row[2] for row in contents.rows] == [4, 4]
    assert changes.rows == (
        ("TorchScript", "right", "right", "wrong"),
        ("dynamo's FX graph", "right", "right", "right"),
    )
    assert all(isinstance(row[1], float) and row[1] > 0 for row in times.rows)


def test_tl_debug_barrier_is_a_barrier_of_the_block() -> None:
    """In a process of its own: once the interpreter has run, parts of Triton's language stay the interpreter's."""
    program = "from sublight.extensions.demos import barriers; print(*barriers.offline().tables[0].rows, sep='\\n')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    rows = {row[0]: row[1:] for row in map(ast.literal_eval, ran.stdout.splitlines())}
    assert rows["bar.sync"] == (0, 1) and rows["atom.global"] == (0, 0)


def test_a_record_is_read_as_written(tmp_path: Path) -> None:
    table = Table(title="t", columns=(("a", "s"), ("b", "")), rows=((1e-6, "x"), (None, "y")), note="n")
    lane = Timeline(title="l", spans=(Span(lane="copy", name="0", start_s=0.0, elapsed_s=1.0),))
    figures = Figures(tables=(table,), timelines=(lane,), missing=("no ncu",))
    record = Record(gpu="H200", driver="580", date="2026-01-01", commit="abc", figures={"overlap": figures})
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record.to_json()))
    assert read_record(path) == record
    assert read_record(tmp_path / "none.json") is None
    path.write_text("{}")
    with pytest.raises(BadInput, match="is no record"):
        read_record(path)
