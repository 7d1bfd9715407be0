"""Compilers, profilers, and whether a CUDA extension can be built with them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sublight import gpus, nvml
from sublight.doctor.packages import first_line, load
from sublight.doctor.record import Check

TOOL_LIMIT_S = 10  # a tool that does not say its version in this time is broken
_VERSION = re.compile(r"\d+(?:\.\d+)+")
TOOLS = (  # command, arguments, what for, fix
    ("nvcc", ("--version",), "CUDA C++ extensions", "install the CUDA toolkit and put its bin folder on PATH"),
    ("ninja", ("--version",), "`new op --ship inline`: extensions built at import", "pip install ninja"),
    ("cmake", ("--version",), "`new op --ship cmake`", "pip install cmake"),
    ("ncu", ("--version",), "hardware counters of a kernel", "install Nsight Compute (in the CUDA toolkit)"),
    ("nsys", ("--version",), "timelines of a whole program", "install Nsight Systems"),
    ("compute-sanitizer", ("--version",), "races and bad accesses in kernels", "install the CUDA toolkit"),
)


def tool(command: str, arguments: Sequence[str], needed_for: str, fix: str) -> Check:
    path = shutil.which(command) or (_nvcc_elsewhere() if command == "nvcc" else None)
    if path is None:
        return Check(name=command, state="missing", needed_for=needed_for, fix=fix)
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, errors="replace", timeout=TOOL_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name=command, state="broken", found=f"{path}: {first_line(error)}", needed_for=needed_for, fix=fix)
    versions = _VERSION.findall(done.stdout + done.stderr)
    return Check(name=command, state="ok", found=versions[0] if versions else path, needed_for=needed_for)


def _nvcc_elsewhere() -> str | None:
    """Where builds find it although it is not on the PATH: CUDA_HOME, the toolkit's usual folder."""
    from sublight.errors import BadInput
    from sublight.extensions import build

    try:
        return build.nvcc()
    except BadInput:
        return None


def c_compiler() -> Check:
    needed_for = "torch.compile, CUDA C++ extensions, Triton's launcher"
    found = next(
        (path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None
    )
    if found is None:
        return Check(
            name="C compiler",
            state="missing",
            needed_for=needed_for,
            fix="install gcc or clang (Debian: apt install gcc)",
        )
    return _tool_named("C compiler", found, needed_for)


def _tool_named(name: str, path: str, needed_for: str) -> Check:
    check = tool(path, ("--version",), needed_for, "reinstall it, or set CC")
    found = f"{Path(path).name} {check.found}" if check.state == "ok" else check.found
    return Check(name=name, state=check.state, found=found, needed_for=needed_for, fix=check.fix)


def cpp_compiler() -> Check:
    """Beside the C compiler: many a machine has gcc and no g++."""
    from sublight.errors import BadInput
    from sublight.extensions import build

    needed_for = "nvcc, `new op`, our CUDA C++ played on the CPU"
    try:
        return _tool_named("C++ compiler", build.host_compiler(), needed_for)
    except BadInput as error:
        problem, _, fix = str(error).partition(": ")
        return Check(name="C++ compiler", state="missing", found=problem, needed_for=needed_for, fix=fix)


def extensions() -> list[Check]:
    """What would keep a CUDA extension from being built here, or from running; nothing where there is no nvcc."""
    from sublight.errors import BadInput
    from sublight.extensions import build, toolchain

    needed_for = "building CUDA C++ extensions"
    gpu = gpus.detect()
    major, minor = (gpu.compute_capability if gpu else None) or (0, 0)
    capability = 10 * major + minor or None
    checks = []
    if words := os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip():
        checks.append(("TORCH_CUDA_ARCH_LIST", toolchain.arch_list_trouble(words, capability), words))
    try:
        torch_cuda = getattr(getattr(load("torch"), "version", None), "cuda", None)
        release = build.nvcc_release(build.nvcc())
    except (BadInput, OSError):
        torch_cuda = release = None  # a missing torch or nvcc has a row of its own
    driver_cuda = nvml.cuda_version()
    if torch_cuda and release:
        checks.append(
            ("nvcc and torch", toolchain.cuda_trouble(torch_cuda, release), f"CUDA {release} and {torch_cuda}")
        )
        home = toolchain.torch_home()
        checks.append(("CUDA's headers", toolchain.headers_trouble(home, build.nvcc()), home))
    if release and driver_cuda:
        wrong = toolchain.driver_trouble(driver_cuda, release)
        checks.append(("nvcc and driver", wrong, f"CUDA {release} and up to {driver_cuda}"))
    if release and capability:
        wrong = toolchain.gpu_trouble(capability, release)
        checks.append(("nvcc and GPU", wrong, f"CUDA {release} and {major}.{minor}"))
    return [
        Check(name=name, state="broken", found=wrong.problem, needed_for=needed_for, fix=wrong.fix)
        if wrong
        else Check(name=name, state="ok", found=words, needed_for=needed_for)
        for name, wrong, words in checks
    ]
