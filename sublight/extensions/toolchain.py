"""What keeps a CUDA extension from being built or run, each in one line: what is wrong, and the fix."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sublight.errors import BadInput
from sublight.extensions import build

# PyTorch's names for architectures, as torch.utils.cpp_extension takes them
NAMES = {
    "Maxwell": (50, 52),
    "Pascal": (60, 61),
    "Volta": (70,),
    "Turing": (75,),
    "Ampere": (80, 86),
    "Ada": (89,),
    "Hopper": (90,),
    "Blackwell": (100, 103, 120),
}
FIRST_RELEASE = (
    (120, "12.8"),
    (103, "12.9"),
    (100, "12.8"),
    (89, "11.8"),
    (86, "11.1"),
    (80, "11.0"),
)  # of CUDA, by GPU
_ENTRY = re.compile(r"(\d+)\.(\d)a?f?(\+PTX)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    problem: str
    fix: str


def arch_list_trouble(words: str, capability: int | None) -> Trouble | None:
    """What is wrong with TORCH_CUDA_ARCH_LIST: an unknown entry, or no code for this machine's GPU.

    >>> arch_list_trouble("8.0;9.0+PTX", 90) is None, arch_list_trouble("8.0+PTX", 90) is None
    (True, True)
    >>> arch_list_trouble("sm_90", 90).problem
    "'sm_90' is no architecture"
    >>> arch_list_trouble("8.0 8.6", 90).problem
    '8.0 8.6 makes no code for this GPU, which is 9.0'
    """
    wanted = f"{capability // 10}.{capability % 10}" if capability else "9.0"
    codes: list[tuple[int, bool]] = []  # for each entry: the architecture, and whether its PTX is kept
    for entry in re.split(r"[;\s]+", words.strip()):
        name = entry.removesuffix("+PTX")
        if name in NAMES:
            codes += [(each, entry.endswith("+PTX")) for each in NAMES[name]]
        elif match := _ENTRY.fullmatch(entry):
            codes.append((10 * int(match[1]) + int(match[2]), bool(match[3])))
        else:
            return Trouble(
                problem=f"{entry!r} is no architecture",
                fix=f"write them as in TORCH_CUDA_ARCH_LIST='8.0;{wanted}+PTX', or unset it for the GPU's own",
            )
    if capability is None or any(_runs_on(code, has_ptx, capability) for code, has_ptx in codes):
        return None
    return Trouble(
        problem=f"{words.strip()} makes no code for this GPU, which is {wanted}",
        fix=f"export TORCH_CUDA_ARCH_LIST={wanted}, and build again",
    )


def _runs_on(code: int, has_ptx: bool, capability: int) -> bool:
    """Machine code runs on later chips of its own generation; PTX is compiled for any later one by the driver."""
    return code <= capability and (has_ptx or code // 10 == capability // 10)


def cuda_trouble(torch_cuda: str | None, nvcc_release: str | None) -> Trouble | None:
    """PyTorch builds extensions only with an nvcc of its own major version.

    >>> cuda_trouble("13.0", "13.2") is None, cuda_trouble(None, "13.0") is None, cuda_trouble("12.8", None) is None
    (True, True, True)
    >>> cuda_trouble("12.8", "13.0").problem
    'nvcc is of CUDA 13.0, torch of 12.8'
    """
    if not torch_cuda or not nvcc_release or torch_cuda.split(".")[0] == nvcc_release.split(".")[0]:
        return None
    return Trouble(
        problem=f"nvcc is of CUDA {nvcc_release}, torch of {torch_cuda}",
        fix=f"set CUDA_HOME to a toolkit of CUDA {torch_cuda.split('.')[0]}, or install torch for "
        f"CUDA {nvcc_release.split('.')[0]}; our own kernels, which need no torch to build, are not affected",
    )


def gpu_trouble(capability: int | None, nvcc_release: str | None) -> Trouble | None:
    """A GPU that this nvcc is older than.

    >>> gpu_trouble(90, "11.8") is None, gpu_trouble(None, "11.0") is None, gpu_trouble(75, "10.0") is None
    (True, True, True)
    >>> gpu_trouble(100, "12.4").problem
    'nvcc of CUDA 12.4 makes no code for this GPU, which is 10.0'
    """
    if not capability or not nvcc_release:
        return None
    first = next((release for known, release in FIRST_RELEASE if capability >= known), None)
    if first is None or _number(nvcc_release) >= _number(first):
        return None
    return Trouble(
        problem=f"nvcc of CUDA {nvcc_release} makes no code for this GPU, which is {capability / 10:.1f}",
        fix=f"install the CUDA toolkit {first} or later, and set CUDA_HOME to it",
    )


def driver_trouble(driver_cuda: str | None, nvcc_release: str | None) -> Trouble | None:
    """Within a major version any driver runs what any nvcc made for its GPU; across, only an older nvcc's.

    >>> driver_trouble("13.0", "12.8") is None, driver_trouble("12.2", "12.8") is None
    (True, True)
    >>> driver_trouble("12.8", "13.0").problem
    'nvcc is of CUDA 13.0, the driver takes up to 12.8'
    """
    if not driver_cuda or not nvcc_release or _number(driver_cuda)[0] >= _number(nvcc_release)[0]:
        return None
    return Trouble(
        problem=f"nvcc is of CUDA {nvcc_release}, the driver takes up to {driver_cuda}",
        fix=f"install a newer driver, or set CUDA_HOME to a toolkit of CUDA {_number(driver_cuda)[0]}",
    )


def torch_home() -> str:
    """Where PyTorch looks for the CUDA toolkit: CUDA_HOME, else the folder above that of the nvcc on the PATH."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return home
    path = shutil.which("nvcc")
    return str(Path(path).parent.parent) if path else "/usr/local/cuda"


def headers_trouble(home: str, nvcc: str) -> Trouble | None:
    """An nvcc on the PATH may be a script that calls another: CUDA's headers are not beside it, where PyTorch looks."""
    if (Path(home) / "include" / "cuda_runtime.h").exists():
        return None
    places = (Path(nvcc).resolve().parent.parent, Path("/usr/local/cuda"))
    near = next((str(each) for each in places if (each / "include" / "cuda_runtime.h").exists()), "the CUDA toolkit")
    return Trouble(
        problem=f"PyTorch looks for CUDA in {home}, which has no include/cuda_runtime.h",
        fix=f"set CUDA_HOME to {near}",
    )


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def torch_cuda() -> str | None:
    """The CUDA version that PyTorch was built with, read from its files: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return _cuda_in(version.read_text(encoding="utf-8")) if version and version.exists() else None


def _cuda_in(version: str) -> str | None:
    """
    >>> _cuda_in("debug = False\\ncuda: Optional[str] = '13.0'"), _cuda_in("cuda: str | None = None")
    ('13.0', None)
    """
    match = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)['\"]", version, re.MULTILINE)
    return match[1] if match else None


def troubles(tools: Iterable[str]) -> list[Trouble]:
    """What is missing or does not fit among these tools; PyTorch is always checked."""
    missing = [] if importlib.util.find_spec("torch") else [Trouble(problem="no PyTorch", fix="pip install torch")]
    for tool in tools:
        if tool == "compiler":
            missing += _complaint_of(build.host_compiler)
        elif tool == "nvcc":
            missing += _nvcc_troubles(torch_cuda())
        elif tool == "triton" and not importlib.util.find_spec("triton"):
            missing.append(Trouble(problem="no Triton", fix="pip install triton (Linux)"))
        elif tool in ("ninja", "cmake") and not shutil.which(tool):
            missing.append(Trouble(problem=f"no {tool} on the PATH", fix=f"pip install {tool}"))
    return missing


def _complaint_of(find: Callable[[], str]) -> list[Trouble]:
    try:
        find()
    except BadInput as error:
        problem, _, fix = str(error).partition(": ")
        return [Trouble(problem=problem, fix=fix)]
    return []


def _nvcc_troubles(cuda: str | None) -> list[Trouble]:
    """What is wrong with nvcc; nothing for a PyTorch for the CPU, which builds extensions without it."""
    if not cuda:
        return []
    if missing := _complaint_of(build.nvcc):
        return missing
    checks = (cuda_trouble(cuda, build.nvcc_release(build.nvcc())), headers_trouble(torch_home(), build.nvcc()))
    failed = [each for each in checks if each]
    words = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if words and (wrong := arch_list_trouble(words, None)):
        failed.append(Trouble(problem=f"TORCH_CUDA_ARCH_LIST: {wrong.problem}", fix=wrong.fix))
    return failed
