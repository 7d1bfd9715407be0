"""Our CUDA C++ to what runs: nvcc makes a cubin for one GPU, a host compiler a library that plays the kernels on a CPU.

Kernels are free of PyTorch, so that a CPU-only PyTorch, or none, compiles them; the results lie in the user's cache, by
a hash of all that went in.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sublight.errors import BadInput
from sublight.folder import cache_folder
from sublight.results import write_file

FOLDER = Path(__file__).parent / "kernels"
TARGETS = (80, 90, 100)
# Files whose instructions only one GPU has: compiled for sm_90a, and no other; the last counts in a test of `top`.
ONE_GPU = {"matmul_hopper.cu": 90, "../../top/tensor_duty.cu": 90}
NVCC_FLAGS = ("-std=c++17", "-cubin", "-Xptxas", "-v")
HOST_FLAGS = ("-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-fPIC", "-shared", "-x", "c++", "-w", "-pthread")
_KERNEL = re.compile(r"Compiling entry function '(\w+)' for 'sm_\d+a?'")
_SPILLS = re.compile(r"(\d+) bytes spill stores")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_RELEASE = re.compile(r"release (\d+\.\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a thread, and for shared memory a block, of a compiled kernel takes."""

    registers: int
    spill_bytes: int
    shared_bytes: int  # static shared memory


def nvcc() -> str:
    """The path of nvcc: from CUDA_HOME, the PATH, or the toolkit's usual folder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [str(Path(home) / "bin" / "nvcc")] if home else []
    for place in (*places, "nvcc", "/usr/local/cuda/bin/nvcc"):
        if path := shutil.which(place):
            return path
    where = f"CUDA_HOME={home} has none" if home else "not on the PATH, not in /usr/local/cuda/bin"
    raise BadInput(f"no nvcc ({where}): install the CUDA toolkit, or set CUDA_HOME to where it is")


@functools.cache
def nvcc_release(path: str) -> str:
    """'13.0'"""
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    if not (release := _RELEASE.search(shown)):
        raise BadInput(f"{path} --version does not say its release: reinstall the CUDA toolkit")
    return release[1]


def host_compiler() -> str:
    """CXX where it is set, as PyTorch and CMake take it; of several words (`ccache g++`) the first is looked for."""
    words = os.environ.get("CXX", "").split()
    if words and not shutil.which(words[0]):
        raise BadInput(f"no C++ compiler at CXX={words[0]}: unset CXX, or set it to one")
    for name in (words[0] if len(words) == 1 else "", "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise BadInput("no C++ compiler (g++, clang++): install one (Debian: apt install g++), or set CXX to it")


def text_of(source: str) -> str:
    """A kernel file and what it may include: what a compiled file depends on."""
    headers = sorted(path.name for path in FOLDER.glob("*.cuh"))
    return "\0".join(path.read_text(encoding="utf-8") for path in (FOLDER / name for name in (source, *headers)))


def cubin(source: str, capability: int) -> Path:
    """The kernels of a file for one GPU, compiled at the first call."""
    compiler = nvcc()
    path = _place(source, f"sm_{capability}.cubin", nvcc_release(compiler), *NVCC_FLAGS)
    if not path.exists():
        write_file(compiled(source, capability)[0], path)
    return path


def targets(source: str) -> tuple[int, ...]:
    return (ONE_GPU[source],) if source in ONE_GPU else TARGETS


def architecture(source: str, capability: int) -> str:
    """
    >>> architecture("matmul.cu", 90), architecture("matmul_hopper.cu", 90)
    ('sm_90', 'sm_90a')
    """
    if ONE_GPU.get(source, capability) != capability:
        raise BadInput(f"{source} is for sm_{ONE_GPU[source]} alone, not for sm_{capability}")
    return f"sm_{capability}{'a' if source in ONE_GPU else ''}"


def compiled(source: str, capability: int) -> tuple[bytes, Mapping[str, Usage]]:
    """Compile now: the cubin, and what each of its kernels takes."""
    compiler = nvcc()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.cubin"
        report = _run(
            [compiler, *NVCC_FLAGS, f"-arch={architecture(source, capability)}", "-o", str(out), str(FOLDER / source)]
        )
        return out.read_bytes(), usages(report)


def ptx(source: str, capability: int) -> str:
    """The kernels of a file in PTX, which the driver compiles for its GPU when it loads them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.ptx"
        _run([nvcc(), "-std=c++17", "-ptx", f"-arch=compute_{capability}", "-o", str(out), str(FOLDER / source)])
        return out.read_text(encoding="utf-8")


def usages(report: str) -> dict[str, Usage]:
    """Each kernel's resources, from what `ptxas -v` prints.

    >>> usages('''ptxas info    : Compiling entry function 'add' for 'sm_90'
    ... ptxas info    : Function properties for add
    ...     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
    ... ptxas info    : Used 12 registers, used 1 barriers, 256 bytes smem''')
    {'add': Usage(registers=12, spill_bytes=4, shared_bytes=256)}
    """
    parts = _KERNEL.split(report)[1:]
    by_kernel = {}
    for name, words in zip(parts[::2], parts[1::2], strict=True):
        spills, used, shared = _SPILLS.search(words), _USED.search(words), _SHARED.search(words)
        if not (spills and used):
            raise BadInput(f"ptxas does not say what {name} takes: {words.strip().splitlines()[0]!r}")
        by_kernel[name] = Usage(
            registers=int(used[1]), spill_bytes=int(spills[1]), shared_bytes=int(shared[1]) if shared else 0
        )
    return by_kernel


def host_library(source: str, kernels: Sequence[str]) -> Path:
    """The kernels of a file, played on the CPU (kernels/played.h), compiled at the first call."""
    compiler = host_compiler()
    player = (FOLDER / "played.h").read_text(encoding="utf-8")
    program = "\n".join((f'#include "{FOLDER / source}"', *(f"PLAY({name})" for name in kernels), ""))
    path = _place(source, "host.so", compiler, player, program, *HOST_FLAGS)
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            stub, out = Path(folder) / "played.cpp", Path(folder) / "played.so"
            stub.write_text(program, encoding="utf-8")
            _run([compiler, *HOST_FLAGS, f"-I{FOLDER}", "-o", str(out), str(stub)])
            write_file(out.read_bytes(), path)
    return path


def _place(source: str, suffix: str, *inputs: str) -> Path:
    key = hashlib.sha256("\0".join((text_of(source), *inputs)).encode()).hexdigest()[:16]
    return cache_folder() / "kernels" / f"{Path(source).stem}-{key}.{suffix}"


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise BadInput(complaint(command[0], done.stderr or done.stdout))
    return done.stdout + done.stderr


def complaint(compiler: str, report: str) -> str:
    """One line of a compiler's many: what it could not do, and the fix where it is known.

    >>> complaint("nvcc", "a.cu(3): error: identifier x is undefined")
    'nvcc: a.cu(3): error: identifier x is undefined'
    """
    name = Path(compiler).name
    if unknown := re.search(
        r"(?:Unsupported gpu architecture|is not defined for option 'gpu-\w+')(?: '(\w+)')?", report
    ):
        which = unknown[1] or next(iter(re.findall(r"'(sm_\d+a?|compute_\d+a?)'", report)), "this GPU")
        return (
            f"{name} does not know {which}: its CUDA is older than this GPU; "
            "install the toolkit of the driver's CUDA version"
        )
    if newer := re.search(r"unsupported GNU version! gcc versions later than (\d+)", report):
        return f"{name} takes no gcc later than {newer[1]}: install g++-{newer[1]}, and set NVCC_CCBIN to it"
    lines = [line for line in report.splitlines() if "error" in line or "fatal" in line] or report.splitlines()
    return f"{name}: {lines[0].strip() if lines else 'failed without a word'}"
