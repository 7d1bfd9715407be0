"""A project builds, tests and benches itself; its CUDA and Triton kernels are right, too, as far as a CPU can say."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.correct import error
from sublight.errors import BadInput
from sublight.extensions import build, toolchain
from sublight.extensions.played import OnCpu
from sublight.extensions.projects import STARTS, WAYS, write
from sublight.extensions.projects.ways import way_of

THREADS = 256  # of a block, as kernels.cu and its launches have it
ROWS, COLS = 37, 300  # no multiples of a block or a tile
TORCH_IN_CPP = re.compile(r"_ZNK?(2at|3c10|5torch)")  # names of PyTorch's C++ functions, which change with its version


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("way", [way.name for way in WAYS])
def test_it_builds_tests_and_benches_itself(way: str, start: str, tmp_path: Path) -> None:
    """A case takes ten to thirty seconds: one of 40 is drawn at each commit."""
    if missing := toolchain.troubles(way_of(way).tools):
        pytest.skip(f"{missing[0].problem}: {missing[0].fix}")
    if not shutil.which("make"):
        pytest.skip("no make")
    project = write("my_op", way, start, tmp_path / "made")
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    environment.pop("TRITON_INTERPRET", None)
    if (way, start) == ("setuptools", "add2"):  # as a compiler without libstdc++.so links
        environment["LDFLAGS"] = "-static-libstdc++"
    command = ["make", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count(" ok on ") == 5 and "GB/s" in done.stdout
    if way == "setuptools" and shutil.which("nm"):
        library = str(project.folder / "my_op" / "_C.so")
        wanted, offered = (
            subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True).stdout
            for which in ("--undefined-only", "--defined-only")
        )
        assert "aoti_torch_" in wanted and not TORCH_IN_CPP.findall(wanted), "not of the stable ABI alone"
        assert "_ZNSo" not in offered and ("_ZNSo" in wanted) == (start != "add2"), "std::ostream is not its own alone"


class _Played:
    """The kernels of a project's kernels.cu, played on the CPU."""

    def __init__(self, start: str, folder: Path) -> None:
        kernels = write("my_op", "load", start, folder / "made").folder / "my_op" / "csrc" / "kernels.cu"
        names = re.findall(r"__global__ void (\w+)\(", kernels.read_text())
        source = folder / "kernels.cu"
        source.write_text(f'#define __CUDACC_RTC__\n#include "block.cuh"\n{kernels.read_text()}')
        self._runners = [OnCpu(str(source), names, reversed=reversed) for reversed in (False, True)]

    def __call__(self, kernel: str, blocks: int, *arguments: Any) -> None:
        """By threads from the first to the last, then from the last to the first; the second's outputs stay."""
        for runner in self._runners:
            runner.launch(f"my_op_{kernel}", (blocks,), (THREADS,), *arguments)


def _double(value: float) -> Any:
    """An argument of 64 bits, as a kernel's double is one: `launch` itself passes a Python float as a C float."""
    bits = struct.unpack("q", struct.pack("d", value))[0]
    return SimpleNamespace(data_ptr=lambda: ctypes.c_longlong(bits).value)


@pytest.fixture
def compiler() -> None:
    try:
        build.host_compiler()
    except BadInput as missing:
        pytest.skip(str(missing))


def rms_norm_cases() -> tuple[Any, ...]:
    """Inputs, and of each output its name, PyTorch's and the truth."""
    x, grad, weight = torch.randn(ROWS, COLS), torch.randn(ROWS, COLS), torch.randn(COLS)

    def by(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in (x, weight)]
        y = torch.nn.functional.rms_norm(leaves[0], (COLS,), leaves[1], 1e-6)
        y.backward(grad.to(dtype))
        return [y.detach(), leaves[0].grad, leaves[1].grad]

    return x, grad, weight, by(torch.float32), by(torch.float64)


def assert_right(outputs: list[torch.Tensor], theirs: list[torch.Tensor], truth: list[torch.Tensor]) -> None:
    for name, *three in zip(("y", "x's gradient", "weight's gradient"), outputs, theirs, truth, strict=True):
        found = error(name, *three)
        assert found.ok, found


def test_the_cuda_kernels_are_right_when_played(compiler: None, tmp_path: Path) -> None:
    run = _Played("rms_norm", tmp_path)
    x, grad, weight, theirs, truth = rms_norm_cases()
    y, x_grad = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    scale, weight_grad = torch.full((ROWS,), torch.nan), torch.full_like(weight, torch.nan)
    run("forward", ROWS, x, weight, y, scale, COLS, _double(1e-6))
    run("backward_x", ROWS, grad, x, weight, scale, x_grad, COLS)
    run("backward_weight", -(-COLS // THREADS), grad, x, scale, weight_grad, ROWS, COLS)
    assert_right([y, x_grad, weight_grad], theirs, truth)


def test_the_cuda_sum_is_right_when_played(compiler: None, tmp_path: Path) -> None:
    a, b = torch.randn(300), torch.randn(300)
    out = torch.full_like(a, torch.nan)
    _Played("add2", tmp_path)("forward", 2, a, b, out, 299)
    assert out[:299].equal((a + b)[:299]) and out[299].isnan()  # n is the bound, not the grid


def _library(start: str, folder: Path, way: str = "triton") -> ModuleType:
    """The module that defines a project's op; a process defines an op once, so it has its own name."""
    name = f"played_{start}_{way}"
    made = write(name, way, start, folder / "made").folder / name / "_library.py"
    spec = importlib.util.spec_from_file_location(f"{name}_library", made)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_triton_kernels_are_right(tmp_path: Path, device: str) -> None:
    pytest.importorskip("triton")
    if device != "cpu":
        pytest.skip("where there is a GPU the project's own test runs them")
    library = _library("rms_norm", tmp_path)
    x, grad, weight, theirs, truth = rms_norm_cases()
    y, x_grad = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    scale, weight_grad = torch.full((ROWS,), torch.nan), torch.full_like(weight, torch.nan)
    library.forward_kernel[(ROWS,)](x, weight, y, scale, COLS, 1e-6, BLOCK=512)
    library.backward_x_kernel[(ROWS,)](grad, x, weight, scale, x_grad, COLS, BLOCK=512)
    grid = (-(-COLS // library.COLS),)
    library.backward_weight_kernel[grid](grad, x, scale, weight_grad, ROWS, COLS, ROWS=library.ROWS, COLS=library.COLS)
    assert_right([y, x_grad, weight_grad], theirs, truth)


def test_nvrtc_hands_its_arguments_to_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Played by a function that the driver's stands for: grid, stream, and each argument behind its pointer."""
    library = _library("add2", tmp_path, "nvrtc")
    seen: list[Any] = []
    pointers = ctypes.POINTER(ctypes.c_void_p)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, pointers, ctypes.c_void_p)
    def launch(function: int, *rest: Any) -> int:
        given, kinds = rest[8], (ctypes.c_void_p, ctypes.c_int, ctypes.c_double)
        seen.extend(
            (function, rest[:7], rest[7], *(kind.from_address(given[at]).value for at, kind in enumerate(kinds)))
        )
        return len(seen) // 6 - 1  # the second one fails

    monkeypatch.setattr(library, "_driver_launch", lambda: launch)
    monkeypatch.setattr(library, "_kernel", lambda name, device: SimpleNamespace(func=ctypes.c_void_p(99)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=2**40))
    x = torch.zeros(3)
    library._launch("k", torch.device("cuda", 0), 5, x, 7, 0.25)
    assert seen == [99, (5, 1, 1, 256, 1, 1, 0), 2**40, x.data_ptr(), 7, 0.25]
    with pytest.raises(RuntimeError, match="the launch of k failed: error 1"):
        library._launch("k", torch.device("cuda", 0), 5, x, 7, 0.25)


@pytest.mark.parametrize("capability", ["90", "100"])
def test_cmake_takes_a_pytorch_for_cuda(capability: str, tmp_path: Path) -> None:
    """As far as its build files: PyTorch's answer is made up, nvcc and CMake are this machine's."""
    try:
        nvcc = build.nvcc()
        build.host_compiler()
    except BadInput as missing:
        pytest.skip(str(missing))
    if not shutil.which("cmake"):
        pytest.skip("no cmake")
    project = write("my_op", "cmake", "add2", tmp_path / "made").folder
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '/usr/include|/usr/lib|13.0|{capability}'\n")
    python.chmod(0o755)
    command = ["cmake", "-B", str(tmp_path / "build"), f"-DPython_EXECUTABLE={python}", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"sm_{capability}" in "".join(each.read_text() for each in (tmp_path / "build").rglob("flags.make"))


@pytest.mark.parametrize("start", STARTS)
def test_what_is_for_a_gpu_compiles(start: str, tmp_path: Path) -> None:
    """kernels.cu by nvcc, and the binding on the stable ABI against CUDA's headers; PyTorch's own for a GPU are not in
    a PyTorch for the CPU, so the other binding is built on a machine with a GPU."""
    try:
        nvcc = build.nvcc()
        build.host_compiler()
    except BadInput as missing:
        pytest.skip(str(missing))
    sources = write("my_op", "setuptools", start, tmp_path / "made").folder / "my_op" / "csrc"
    binding = ["-std=c++20", "-c", "-DWITH_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    binding += [f"-I{Path(torch.__file__).parent / 'include'}", str(sources / "binding.cpp")]
    kernels = ["-std=c++17", "-cubin", "-arch=sm_90", str(sources / "kernels.cu")]
    for words in (kernels, binding):
        command = [nvcc, "-o", str(tmp_path / "out"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
