"""What is installed, what works here, what does not, and the fix for each. Needs neither torch nor a GPU."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sublight import __version__, gpus, nvml

State = Literal["ok", "missing", "broken"]
PYTHON = (3, 11)
TOOL_LIMIT_S = 10  # a tool that does not say its version in this time is broken
DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
CAP_SYS_ADMIN = 21  # the bit of the capability that may read counters whatever the driver says
_VERSION = re.compile(r"\d+(?:\.\d+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that sublight can use."""

    name: str
    state: State
    found: str = ""  # the version, the device, the folder
    needed_for: str
    fix: str = ""  # empty where there is nothing to fix
    required: bool = False  # without it no verb works


def examine() -> tuple[Check, ...]:
    """Everything, in the order in which a person would set a machine up."""
    return (
        _python(),
        Check(name="sublight", state="ok", found=__version__, needed_for="everything", required=True),
        *(_package(*row) for row in PACKAGES),
        *_torch(),
        _gpu(),
        _driver(),
        *(_tool(*row) for row in TOOLS),
        _counters(),
        _compiler(),
        _cpp_compiler(),
        *_extensions(),
        *_backend(),
        _cache(),
        _limits(),
    )


def broken(checks: Sequence[Check]) -> bool:
    """Is something amiss that no verb can do without?"""
    return any(check.required and check.state != "ok" for check in checks)


PACKAGES = (  # module, what for, fix, required
    ("typer", "the command", "pip install sublight", True),
    ("rich", "tables", "pip install sublight", True),
    ("numpy", "torch and Triton's interpreter", "pip install numpy", False),
    ("triton", "our kernels", "pip install 'sublight[torch]' (Linux only)", False),
    ("resvg_py", "`bench --plot FILE.png`", "pip install 'sublight[plot]'", False),
)
TOOLS = (  # command, arguments, what for, fix
    ("nvcc", ("--version",), "CUDA C++ extensions", "install the CUDA toolkit and put its bin folder on PATH"),
    ("ninja", ("--version",), "`new op --ship inline`: extensions built at import", "pip install ninja"),
    ("cmake", ("--version",), "`new op --ship cmake`", "pip install cmake"),
    ("ncu", ("--version",), "hardware counters of a kernel", "install Nsight Compute (in the CUDA toolkit)"),
    ("nsys", ("--version",), "timelines of a whole program", "install Nsight Systems"),
    ("compute-sanitizer", ("--version",), "races and bad accesses in kernels", "install the CUDA toolkit"),
)


def _python() -> Check:
    found, wanted = platform.python_version(), ".".join(map(str, PYTHON))
    state: State = "ok" if sys.version_info[:2] >= PYTHON else "broken"
    fix = "" if state == "ok" else f"install Python {wanted} or later"
    return Check(
        name="Python",
        state=state,
        found=f"{found} on {platform.system()}",
        needed_for="everything",
        fix=fix,
        required=True,
    )


def _package(module: str, needed_for: str, fix: str, required: bool) -> Check:
    name = module.replace("_", "-")
    loaded = _load(module)
    if isinstance(loaded, Exception):
        missing = isinstance(loaded, ModuleNotFoundError) and loaded.name == module
        state: State = "missing" if missing else "broken"
        found = "" if missing else _first_line(loaded)
        return Check(name=name, state=state, found=found, needed_for=needed_for, fix=fix, required=required)
    return Check(name=name, state="ok", found=_version(module, loaded), needed_for=needed_for, required=required)


def _load(module: str) -> Any:
    """The module, or the exception that its import raised: a broken install must not stop the doctor."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        return error


def _version(module: str, loaded: Any) -> str:
    from importlib import metadata

    try:
        return metadata.version(module.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return str(getattr(loaded, "__version__", ""))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _torch() -> list[Check]:
    """torch, and the CUDA or ROCm runtime that it brings."""
    needed_for, fix = "limits, bench, the ops", "pip install 'sublight[torch]'"
    torch = _load("torch")
    runtime = Check(
        name="CUDA runtime", state="missing", needed_for="the GPU", fix="install a torch built for CUDA or ROCm"
    )
    if isinstance(torch, Exception):
        state: State = "missing" if isinstance(torch, ModuleNotFoundError) and torch.name == "torch" else "broken"
        found = "" if state == "missing" else _first_line(torch)
        return [Check(name="torch", state=state, found=found, needed_for=needed_for, fix=fix), runtime]
    build = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    version = torch.version.hip or torch.version.cuda
    if version:
        runtime = Check(name=f"{build.upper()} runtime", state="ok", found=version, needed_for="the GPU")
    return [
        Check(name="torch", state="ok", found=f"{torch.__version__} ({build} build)", needed_for=needed_for),
        runtime,
    ]


def _gpu() -> Check:
    needed_for = "kernels at speed; without one the CPU is measured"
    try:
        gpu = gpus.detect()
    except Exception as error:  # a driver that torch cannot talk to fails in many ways
        fix = "reboot, or install a driver that fits this torch"
        return Check(name="GPU", state="broken", found=_first_line(error), needed_for=needed_for, fix=fix)
    if gpu is not None:
        capability = f", sm_{''.join(map(str, gpu.compute_capability))}" if gpu.compute_capability else ""
        return Check(name="GPU", state="ok", found=f"{gpu.name}{capability}", needed_for=needed_for)
    if nvml.health() is not None:  # the driver sees one, torch does not
        return Check(
            name="GPU",
            state="broken",
            found="torch cannot use it",
            needed_for=needed_for,
            fix="install a torch built for CUDA",
        )
    return Check(
        name="GPU", state="missing", needed_for=needed_for, fix="none needed; `--device cpu` is the default here"
    )


def _driver() -> Check:
    health = nvml.health()
    needed_for = "clocks, throttling, energy beside every time"
    if health is not None:
        return Check(name="NVML and driver", state="ok", found=health.driver, needed_for=needed_for)
    missing = isinstance(_load("pynvml"), Exception)
    fix = "pip install nvidia-ml-py" if missing else "install NVIDIA's driver"
    return Check(
        name="NVML and driver",
        state="missing",
        found="no pynvml" if missing else "no driver",
        needed_for=needed_for,
        fix=fix,
    )


def _tool(command: str, arguments: Sequence[str], needed_for: str, fix: str) -> Check:
    path = shutil.which(command) or (_nvcc_elsewhere() if command == "nvcc" else None)
    if path is None:
        return Check(name=command, state="missing", needed_for=needed_for, fix=fix)
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(
            name=command, state="broken", found=f"{path}: {_first_line(error)}", needed_for=needed_for, fix=fix
        )
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


def _counters() -> Check:
    """May ncu read hardware counters? The driver keeps them for administrators unless told otherwise."""
    needed_for = "ncu: what a kernel waits for"
    try:
        parameters = DRIVER_PARAMETERS.read_text()
    except OSError:
        return Check(
            name="GPU counters",
            state="missing",
            found="no NVIDIA kernel module",
            needed_for=needed_for,
            fix="install NVIDIA's driver",
        )
    if "RmProfilingAdminOnly: 1" in parameters and not _is_admin():
        fix = "sudo, or the module option NVreg_RestrictProfilingToAdminUsers=0 and a reboot"
        return Check(
            name="GPU counters", state="broken", found="for administrators only", needed_for=needed_for, fix=fix
        )
    return Check(name="GPU counters", state="ok", found="readable", needed_for=needed_for)


def _is_admin() -> bool:
    """Root in a container often lacks the capability that the driver asks for."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(match and int(match[1], 16) >> CAP_SYS_ADMIN & 1)


def _compiler() -> Check:
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
    check = _tool(path, ("--version",), needed_for, "reinstall it, or set CC")
    found = f"{Path(path).name} {check.found}" if check.state == "ok" else check.found
    return Check(name=name, state=check.state, found=found, needed_for=needed_for, fix=check.fix)


def _cpp_compiler() -> Check:
    """Beside the C compiler: many a machine has gcc and no g++."""
    from sublight.errors import BadInput
    from sublight.extensions import build

    needed_for = "nvcc, `new op`, our CUDA C++ played on the CPU"
    try:
        return _tool_named("C++ compiler", build.host_compiler(), needed_for)
    except BadInput as error:
        problem, _, fix = str(error).partition(": ")
        return Check(name="C++ compiler", state="missing", found=problem, needed_for=needed_for, fix=fix)


def _extensions() -> list[Check]:
    """What would keep a CUDA extension from being built here, or from running; nothing where there is no nvcc."""
    from sublight.errors import BadInput
    from sublight.extensions import build, toolchain

    needed_for = "building CUDA C++ extensions"
    gpu = gpus.detect()
    major, minor = (gpu.compute_capability if gpu else None) or (0, 0)
    capability = 10 * major + minor or None
    found = []
    if words := os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip():
        found.append(("TORCH_CUDA_ARCH_LIST", toolchain.arch_list_trouble(words, capability), words))
    try:
        torch_cuda = getattr(getattr(_load("torch"), "version", None), "cuda", None)
        release = build.nvcc_release(build.nvcc())
    except (BadInput, OSError):
        torch_cuda = release = None  # either has a row of its own
    driver_cuda = nvml.cuda_version()
    if torch_cuda and release:
        found.append(
            ("nvcc and torch", toolchain.cuda_trouble(torch_cuda, release), f"CUDA {release} and {torch_cuda}")
        )
        home = toolchain.torch_home()
        found.append(("CUDA's headers", toolchain.headers_trouble(home, build.nvcc()), home))
    if release and driver_cuda:
        wrong = toolchain.driver_trouble(driver_cuda, release)
        found.append(("nvcc and driver", wrong, f"CUDA {release} and up to {driver_cuda}"))
    if release and capability:
        wrong = toolchain.gpu_trouble(capability, release)
        found.append(("nvcc and GPU", wrong, f"CUDA {release} and {major}.{minor}"))
    return [
        Check(name=name, state="broken", found=wrong.problem, needed_for=needed_for, fix=wrong.fix)
        if wrong
        else Check(name=name, state="ok", found=words, needed_for=needed_for)
        for name, wrong, words in found
    ]


def _backend() -> list[Check]:
    """The private parts of Triton and PyTorch that we use, quick launches, and calls in C++."""
    needed = {"private parts": "xray, patch, graph", "quick launches": "eager calls of ops: 15 µs each"}
    try:
        import torch

        from sublight.backend import launch, native, private
        from sublight.backend.jit import AVAILABLE, why_no_gluon
    except ImportError:
        return []  # what is missing is in a row of its own
    is_cuda = gpus.detect() is not None
    lacking = private.missing(without=() if AVAILABLE else ("triton",)) if is_cuda or AVAILABLE else []
    lacking = [words for words in lacking if is_cuda or "_cuda" not in words]
    lacking += [why_no_gluon] if AVAILABLE and why_no_gluon else []
    newest = "use torch 2.11 to 2.13 and triton 3.6 to 3.9, or tell us"
    checks = [
        Check(
            name="private parts", state="broken" if lacking else "ok", needed_for=needed["private parts"],
            found="; ".join(lacking) or f"all {len(private.PARTS)} as expected", fix=newest if lacking else "",
        )
    ]  # fmt: skip
    if not is_cuda or not AVAILABLE:
        return checks
    try:
        launch.self_check(torch.cuda.current_device())
        slow = launch.why_slow()
    except Exception as error:
        slow = _first_line(error)
    checks.append(
        Check(
            name="quick launches", state="broken" if slow else "ok", needed_for=needed["quick launches"],
            found=slow or "as Triton's own", fix=newest if slow else "",
        )
    )  # fmt: skip
    why_not = native.why_not()
    built = native.file_of(cuda=True).exists()
    checks.append(
        Check(
            name="calls in C++", state="missing" if why_not else "ok", needed_for="eager calls of ops: 5 to 10 µs each",
            found=why_not or ("built" if built else "built in the background at an op's first call"),
            fix="" if not why_not or "SUBLIGHT_NATIVE" in why_not else "install g++ and the CUDA toolkit's headers",
        )
    )  # fmt: skip
    return checks


def _cache() -> Check:
    """Can measured limits be kept? Tried by writing: permissions do not tell of a full or read-only disk."""
    from sublight.folder import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"sublight")
    except OSError as error:
        fix = "make it writable, or set SUBLIGHT_CACHE to a folder that is"
        return Check(
            name="cache folder",
            state="broken",
            found=f"{folder}: {error.strerror}",
            needed_for="keeping measured limits",
            fix=fix,
        )
    return Check(name="cache folder", state="ok", found=str(folder), needed_for="keeping measured limits")


def _limits() -> Check:
    from sublight.limits import run

    needed_for = "floors without measuring anew"
    try:
        limits = run.cached(run.this_machine())
    except Exception as error:  # whatever keeps the machine from being asked was named above
        return Check(
            name="limits", state="broken", found=_first_line(error), needed_for=needed_for, fix="see the lines above"
        )
    if limits is None:
        return Check(
            name="limits", state="missing", found="not measured yet", needed_for=needed_for, fix="sublight limits"
        )
    return Check(
        name="limits",
        state="ok",
        found=f"{len(limits.limits)} of {limits.device}, {limits.date[:10]}",
        needed_for=needed_for,
    )
