"""The ways an op gets into PyTorch, and the ops that a project starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sublight.errors import one_of

TEMPLATES = Path(__file__).with_name("templates")
Tool = Literal["compiler", "ninja", "cmake", "triton", "nvcc"]
_FILES = {  # a project's files by name, each with a line about it
    "kernels.h": "the arithmetic on a CPU, and what kernels.cu offers; nothing of PyTorch",
    "kernels.cu": "the CUDA kernels, and what launches them; nothing of PyTorch",
    "binding.cpp": "the op as PyTorch's dispatcher knows it: schema, checks, CPU and CUDA implementation",
    "__init__.py": "what a user imports: the function, its fake kernel, its gradient",
    "_library.py": "defines or loads the op",
    "setup.py": "the build",
    "CMakeLists.txt": "the build",
    "pyproject.toml": "name, version, what it needs",
    "cases.py": "inputs, PyTorch's own function, bytes moved: for the test and the benchmark",
    "test_op_name.py": "the test: values, gradients, `opcheck`, `torch.compile`",
    "bench_op_name.py": "the benchmark, beside PyTorch's own function",
    "Makefile": "`make`: builds, tests, benches",
    "README.md": "what is where, and how to make it yours",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to ship an op."""

    name: str
    summary: str
    sources: dict[str, str]  # a start's file -> its path in the project
    build: str = ""  # commands of the Makefile; empty: the first import or the first call builds
    tools: tuple[Tool, ...]  # tools that the build needs
    arithmetic: str  # the files that hold the op's arithmetic


_CSRC = {"kernels.h": "op_name/csrc/kernels.h", "kernels.cu": "op_name/csrc/kernels.cu"}
_IN_CSRC = "`op_name/csrc/kernels.h` for the CPU, `kernels.cu` for a GPU"
WAYS: tuple[Way, ...] = (
    Way(
        name="inline",
        summary="C++ and CUDA C++ as text in a Python file, built at the first import (`load_inline`)",
        sources={},
        tools=("compiler", "ninja", "nvcc"),
        arithmetic="`HEADER` for the CPU and `KERNELS` for a GPU, in `op_name/_library.py`",
    ),
    Way(
        name="load",
        summary="C++ and CUDA C++ in files of their own, built at the first import (`load`)",
        sources=_CSRC | {"binding.cpp": "op_name/csrc/binding.cpp"},
        tools=("compiler", "ninja", "nvcc"),
        arithmetic=_IN_CSRC,
    ),
    Way(
        name="setuptools",
        summary="a wheel by setuptools, on PyTorch's stable ABI: one wheel serves PyTorch 2.11 and later",
        sources=_CSRC | {"stable.cpp": "op_name/csrc/binding.cpp"},
        build="$(PYTHON) setup.py -q build_ext --inplace",
        tools=("compiler", "nvcc"),
        arithmetic=_IN_CSRC,
    ),
    Way(
        name="cmake",
        summary="a shared library by CMake, `TORCH_LIBRARY` and `torch.ops.load_library`",
        sources=_CSRC | {"binding.cpp": "op_name/csrc/binding.cpp"},
        build="cmake -B build -DPython_EXECUTABLE=$$(command -v $(PYTHON)) && cmake --build build",
        tools=("compiler", "cmake", "nvcc"),
        arithmetic=_IN_CSRC,
    ),
    Way(
        name="nvrtc",
        summary="CUDA C++ that NVRTC compiles at the first call (`torch.cuda._compile_kernel`): no compiler needed",
        sources={"kernels.cu": "op_name/csrc/kernels.cu", "nvrtc.py": "op_name/_library.py"},
        tools=(),
        arithmetic="`op_name/csrc/kernels.cu` for a GPU, `op_name/_library.py` for the CPU",
    ),
    Way(
        name="triton",
        summary="a Triton kernel (`triton_op`), which torch.compile sees into: no compiler needed",
        sources={"triton.py": "op_name/_library.py"},
        tools=("triton",),
        arithmetic="`op_name/_library.py`",
    ),
)
STARTS = {  # what a project's op computes at first
    "add2": "the sum of two tensors: the least that an op can be",
    "rms_norm": "RMS norm with its gradient, kernels that sum over rows and over columns",
}


def way_of(name: str) -> Way:
    names = [way.name for way in WAYS]
    return WAYS[names.index(one_of("way to ship", name, names))]


def words_about(file: str) -> str:
    """One line about a file of a project, by its name in the template."""
    return _FILES[Path(file).name]
