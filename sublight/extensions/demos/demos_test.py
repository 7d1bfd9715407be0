"""Demonstrations against a driver that answers without a GPU: every call is one that libcuda has, and all of them run."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sublight.errors import BadInput
from sublight.extensions import build, driver
from sublight.extensions.demos import DEMOS, graphs, host_memory, jit, ncu, nvtx, occupancy, overlap, run, waiting
from sublight.extensions.demos.demo import Demo, Figures, Record, Table, figures_of, read_record
from sublight.extensions.demos.gpu import Gpu, why_no_gpu
from sublight.extensions.demos.graphs import GRAPHS

EXPORTED = set(  # of libcuda.so.1, as the driver of CUDA 13.0 has them
    """cuCtxResetPersistingL2Cache cuCtxSetCurrent cuCtxSetLimit cuCtxSynchronize cuDeviceGet cuDeviceGetAttribute
    cuDeviceGetCount cuDeviceGetName cuDevicePrimaryCtxRetain cuDevicePrimaryCtxSetFlags_v2 cuEventCreate
    cuEventElapsedTime cuEventRecord cuEventSynchronize cuFuncGetName cuFuncSetAttribute cuGraphGetNodes
    cuGraphInstantiateWithFlags cuGraphKernelNodeGetParams_v2 cuGraphLaunch cuGraphNodeGetType cuInit cuKernelGetName
    cuLaunchCooperativeKernel cuLaunchKernel cuMemAllocAsync cuMemAlloc_v2 cuMemFreeAsync cuMemFreeHost cuMemFree_v2
    cuMemHostAlloc cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2 cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemsetD32_v2
    cuModuleGetFunction cuModuleGetGlobal_v2 cuModuleLoadData cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuStreamBeginCapture_v2 cuStreamCreate cuStreamEndCapture cuStreamQuery cuStreamSetAttribute cuStreamSynchronize
    cuStreamWaitEvent cuTexObjectCreate""".split()
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
