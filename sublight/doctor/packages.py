"""Python, its packages, torch: what is installed, in which version, and whether it can be imported."""

from __future__ import annotations

import importlib
import platform
import sys
from typing import Any

from sublight.doctor.record import Check, State

PYTHON = (3, 11)
PACKAGES = (  # module, what for, fix, required
    ("typer", "the command", "pip install sublight", True),
    ("rich", "tables", "pip install sublight", True),
    ("numpy", "torch and Triton's interpreter", "pip install numpy", False),
    ("triton", "our kernels", "pip install 'sublight[torch]' (Linux only)", False),
    ("resvg_py", "`bench --plot FILE.png`", "pip install 'sublight[plot]'", False),
)


def python() -> Check:
    version, wanted = platform.python_version(), ".".join(map(str, PYTHON))
    state: State = "ok" if sys.version_info[:2] >= PYTHON else "broken"
    fix = "" if state == "ok" else f"install Python {wanted} or later"
    return Check(
        name="Python",
        state=state,
        found=f"{version} on {platform.system()}",
        needed_for="everything",
        fix=fix,
        required=True,
    )


def package(module: str, needed_for: str, fix: str, required: bool) -> Check:
    name = module.replace("_", "-")
    loaded = load(module)
    if isinstance(loaded, Exception):
        missing = isinstance(loaded, ModuleNotFoundError) and loaded.name == module
        state: State = "missing" if missing else "broken"
        found = "" if missing else first_line(loaded)
        return Check(name=name, state=state, found=found, needed_for=needed_for, fix=fix, required=required)
    return Check(name=name, state="ok", found=_version(module, loaded), needed_for=needed_for, required=required)


def load(module: str) -> Any:
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


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def torch_and_runtime() -> list[Check]:
    """torch, and the CUDA or ROCm runtime that it brings."""
    needed_for, fix = "limits, bench, the ops", "pip install 'sublight[torch]'"
    torch = load("torch")
    runtime = Check(
        name="CUDA runtime", state="missing", needed_for="the GPU", fix="install a torch built for CUDA or ROCm"
    )
    if isinstance(torch, Exception):
        state: State = "missing" if isinstance(torch, ModuleNotFoundError) and torch.name == "torch" else "broken"
        found = "" if state == "missing" else first_line(torch)
        return [Check(name="torch", state=state, found=found, needed_for=needed_for, fix=fix), runtime]
    build = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    version = torch.version.hip or torch.version.cuda
    if version:
        runtime = Check(name=f"{build.upper()} runtime", state="ok", found=version, needed_for="the GPU")
    return [
        Check(name="torch", state="ok", found=f"{torch.__version__} ({build} build)", needed_for=needed_for),
        runtime,
    ]
