"""Kernels of a CUDA C++ file, by nvcc: one run gives the PTX and the cubin."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sublight.gpus import Gpu
from sublight.op import BadInput
from sublight.xray import binary, build
from sublight.xray.complaint import first_line
from sublight.xray.inputs.binary_files import chosen, demangled
from sublight.xray.launch import compilable
from sublight.xray.record import Code

_ERROR = re.compile(r"^(.+?)\((\d+)\): (?:catastrophic |fatal )?error\s*(?:#[\w-]+)?:\s*(.+)$", re.MULTILINE)
_HOST_ERROR = re.compile(r"^(.+?):(\d+)(?::\d+)?: (?:fatal )?error: (.+)$", re.MULTILINE)


def codes_of_cuda(
    file: Path,
    kernel: str,
    gpus: Sequence[Gpu],
    *,
    threads: int | None = None,
    shared_bytes: int = 0,
    flags: Sequence[str] = (),
) -> tuple[Code, ...]:
    """Compiled for every GPU; the threads are those of __launch_bounds__ unless they are given."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise BadInput(
            f"{file} needs nvcc, which is not on the PATH: install the CUDA toolkit, or give a .ptx or .cubin"
        )
    found: list[Code] = []
    for gpu in gpus:
        cubin, ptx, told = _compiled(nvcc, file, compilable(gpu), flags)
        symbols = binary.entries(ptx)
        if not symbols:
            raise BadInput(
                f"{file} has no kernel: a template needs an instance, such as template __global__ void k<float>(…)"
            )
        names = demangled(symbols)
        wanted = chosen(kernel, names, file)
        codes = build.codes(
            cubin, gpu, ptx=ptx, dynamic_shared_bytes=shared_bytes, threads=threads, names=names,
            spilled=binary.spills(told),
        )  # fmt: skip
        found += [replace(code, file=str(file.resolve())) for code in codes if code.symbol in wanted]
    return tuple(found)


def _compiled(nvcc: str, file: Path, capability: int, flags: Sequence[str]) -> tuple[bytes, str, str]:
    arch = f"sm_{capability}{'a' if capability >= 90 else ''}"  # what only this architecture has may be used
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.cubin"
        command = [
            *(nvcc, "-cubin", "-lineinfo", f"-arch={arch}", "-Xptxas", "-v", "-keep", "-keep-dir", folder),
            *("-I", str(file.resolve().parent), *flags, "-o", str(out), str(file.resolve())),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        told = done.stdout + done.stderr
        if done.returncode:
            raise BadInput(_what_nvcc_says(told, file))
        (ptx,) = Path(folder).glob("*.ptx")
        return out.read_bytes(), ptx.read_text(encoding="utf-8", errors="replace"), told


def _what_nvcc_says(told: str, file: Path) -> str:
    if error := _ERROR.search(told) or _HOST_ERROR.search(told):
        return f"{error[1]}:{error[2]}: nvcc: {error[3]}"
    line = next((line for line in told.splitlines() if "error" in line or "fatal" in line), first_line(told))
    return f"{file}: nvcc: {line.strip()}"
