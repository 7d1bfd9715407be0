"""The tools that read and make GPU code: Triton's wheel carries ptxas, cuobjdump and nvdisasm; nvcc is the user's own."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from sublight.op import BadInput
from sublight.xray.record import RESERVED_SHARED_BYTES, Resources

_SECTION = re.compile(r"^//-+ \.text\.(\S+)\s+-+$", re.MULTILINE)
_FUNCTION = re.compile(r"Function (\S+?):\s*\n\s*(REG:.*)")


@functools.cache
def tool(name: str) -> str:
    """Where a tool is: in Triton's wheel, or on the PATH."""
    found = importlib.util.find_spec("triton")
    folders = (
        [Path(folder) / "backends/nvidia/bin" for folder in (found.submodule_search_locations or ())] if found else []
    )
    for folder in folders:
        if (folder / name).is_file() and os.access(folder / name, os.X_OK):
            return str(folder / name)
    if path := shutil.which(name):
        return path
    raise BadInput(f"{name} is not here: pip install triton (Linux) brings it, and so does the CUDA toolkit")


def disassemble(cubin: bytes) -> dict[str, str]:
    """Symbol -> SASS with a comment at every change of source line."""
    told = _run(tool("nvdisasm"), "-g", "-c", file=cubin, suffix=".cubin")
    marks = list(_SECTION.finditer(told))
    ends = [mark.start() for mark in marks[1:]] + [len(told)]
    return {mark[1]: told[mark.end() : end].strip("\n") for mark, end in zip(marks, ends, strict=True)}


def usage(cubin: bytes) -> dict[str, dict[str, int]]:
    """Symbol -> REG, STACK, SHARED, LOCAL, …: what the driver will say of it."""
    told = _run(tool("cuobjdump"), "-res-usage", file=cubin, suffix=".cubin")
    return {
        symbol: {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", words)}
        for symbol, words in _FUNCTION.findall(told)
    }


def architecture(cubin: bytes) -> int:
    """90 of a cubin for sm_90, from the ELF header."""
    if cubin[:4] != b"\x7fELF":
        raise BadInput("this is no cubin: it does not begin as an ELF file does")
    if int.from_bytes(cubin[18:20], "little") != 190:
        raise BadInput("this ELF file is no NVIDIA cubin: its machine is not CUDA's")
    flags = int.from_bytes(cubin[48:52], "little")
    low = flags & 0xFF
    return low if low >= 30 else (flags >> 8) & 0xFF  # CUDA 13 moved it


def resources(
    used: dict[str, int], sass: str, *, dynamic_shared_bytes: int, threads: int | None, capability: int
) -> Resources:
    """The tools' figures in our words."""
    reserved = RESERVED_SHARED_BYTES if capability >= 90 and used.get("SHARED", 0) >= RESERVED_SHARED_BYTES else 0
    barriers = {int(number, 16) for number in re.findall(r"\bBAR\.\S+(?: \S+,)? (0x[0-9a-f]+)", sass)}
    return Resources(
        registers=used["REG"],
        spill_bytes=used.get("STACK", 0) if re.search(r"\b(STL|LDL)\b", sass) else 0,
        stack_bytes=used.get("STACK", 0),
        static_shared_bytes=used.get("SHARED", 0) - reserved,
        dynamic_shared_bytes=dynamic_shared_bytes,
        barriers=max(barriers, default=-1) + 1,
        threads=threads,
    )


def assemble(ptx: str, capability: int) -> bytes:
    """PTX -> cubin by ptxas; what it complains of is the user's to mend."""
    target = re.search(r"^\s*\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    suffix = "a" if capability >= 90 and target and target[1].endswith("a") else ""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        file.write_text(ptx, encoding="utf-8")
        done = subprocess.run(
            [_newest_ptxas(), f"-arch=sm_{capability}{suffix}", "-lineinfo", "-o", out, file], capture_output=True, text=True
        )
        if done.returncode:
            raise BadInput(f"ptxas: {_first_line(done.stderr)}")
        return out.read_bytes()


def _newest_ptxas() -> str:
    """Triton's wheel has two, and the one it calls Blackwell's reads newer PTX for every target."""
    try:
        return tool("ptxas-blackwell")
    except BadInput:
        return tool("ptxas")


def _first_line(told: str) -> str:
    lines = [line for line in told.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line or "fatal" in line), lines[0] if lines else "no message")


def _run(command: str, *words: str, file: bytes, suffix: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=suffix) as holder:
        holder.write(file)
        holder.flush()
        done = subprocess.run([command, *words, holder.name], capture_output=True, text=True)
    if done.returncode:
        raise BadInput(f"{Path(command).name}: {_first_line(done.stderr)}")
    return done.stdout
