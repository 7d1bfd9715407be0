"""The tools that read and make GPU code: Triton's wheel has ptxas, cuobjdump and nvdisasm; nvcc is the user's own."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sublight.errors import BadInput
from sublight.xray.record import RESERVED_SHARED_BYTES, Resources

_SECTION = re.compile(r"^//-+ \.text\.(\S+)\s+-+$", re.MULTILINE)
_FUNCTION = re.compile(r"Function (\S+?):\s*\n\s*(REG:.*)")
_ENTRY = re.compile(r"^[ \t]*(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$]+)", re.MULTILINE)
_BRACE = re.compile(r"//[^\n]*|[{}]")
_ARRAY = re.compile(r"^\s*\.local\b[^;\n]*?\.[busf](\d+)\s+[\w$]+\[(\d+)\]", re.MULTILINE)
_LOCAL = re.compile(r"\b(STL|LDL)((?:\.\w+)*) [^;\[]*\[(\w+)(?:\+(0x[0-9a-f]+))?\]")
_SPILLS = re.compile(r"Function properties for (\S+)\s*\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads")
_INDIRECT = re.compile(r"\b(?:BRX|BRXU|JMX|JMXU)\b")
_INFO = re.compile(r"^\.nv\.info\.(\S+)$", re.MULTILINE)
_ATTRIBUTE = re.compile(r"EIATTR_(NUM_BARRIERS|REQNTID|MAX_THREADS)\s+Format:\s+\S+\s+Value:\s+((?:0x[0-9a-f]+ ?)+)")
_MACHINES = {62: "a program of x86-64", 183: "a program of AArch64", 224: "AMD's", 0: "of no machine"}

_CUT_OFF = "this cubin holds no code: it is cut off, or of a compiler that is newer than the tools here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A cubin, and by symbol the bytes that it spills, as the assembler says."""

    cubin: bytes
    spilled: Mapping[str, int]


@functools.cache
def tool(name: str) -> str:
    """The path of a tool, from Triton's wheel or the PATH."""
    wheel = importlib.util.find_spec("triton")
    folders = (
        [Path(folder) / "backends/nvidia/bin" for folder in (wheel.submodule_search_locations or ())] if wheel else []
    )
    for folder in folders:
        if (folder / name).is_file() and os.access(folder / name, os.X_OK):
            return str(folder / name)
    if path := shutil.which(name):
        return path
    raise BadInput(f"{name} is not here: pip install triton (Linux) brings it, and so does the CUDA toolkit")


def disassemble(cubin: bytes) -> dict[str, str]:
    """Symbol -> SASS with a comment at every change of source line. Where indirect branches lead takes nvdisasm a third
    of its time to find out, so it is asked only where there are some."""
    output = _run(tool("nvdisasm"), "-ndf", "-gi", "-c", file=cubin, suffix=".cubin")
    if _INDIRECT.search(output):
        output = _run(tool("nvdisasm"), "-gi", "-c", file=cubin, suffix=".cubin")
    marks = list(_SECTION.finditer(output))
    ends = [mark.start() for mark in marks[1:]] + [len(output)]
    return {mark[1]: output[mark.end() : end].strip("\n") for mark, end in zip(marks, ends, strict=True)}


def usage(cubin: bytes) -> dict[str, dict[str, int]]:
    """Symbol -> REG, STACK, SHARED, LOCAL, … as the driver will say; BARRIERS; THREADS where the kernel fixes them."""
    output = _run(tool("cuobjdump"), "-res-usage", file=cubin, suffix=".cubin")
    marked = _run(tool("cuobjdump"), "-elf", file=cubin, suffix=".cubin")
    marks = list(_INFO.finditer(marked))
    ends = [mark.start() for mark in marks[1:]] + [len(marked)]
    attributes = {mark[1]: _attributes(marked[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)}
    return {
        symbol: {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", words)}
        | attributes.get(symbol, {"BARRIERS": 0})
        for symbol, words in _FUNCTION.findall(output)
    }


def _attributes(section: str) -> dict[str, int]:
    """Of one kernel's .nv.info: the threads that it asks for, or the most that it was compiled for."""
    attributes = {name: [int(word, 16) for word in words.split()] for name, words in _ATTRIBUTE.findall(section)}
    threads = attributes.get("REQNTID") or attributes.get("MAX_THREADS")
    fixed = {"THREADS": math.prod(threads)} if threads else {}
    return {"BARRIERS": attributes.get("NUM_BARRIERS", [0])[0]} | fixed


def architecture(cubin: bytes) -> int:
    """90 of a cubin for sm_90, from the ELF header."""
    if cubin[:4] != b"\x7fELF":
        raise BadInput("this is no cubin: it does not begin as an ELF file does")
    if len(cubin) < 64:
        raise BadInput(_CUT_OFF)
    if int.from_bytes(cubin[18:20], "little") != 190:
        machine = int.from_bytes(cubin[18:20], "little")
        raise BadInput(f"this ELF file is no NVIDIA cubin, it is {_MACHINES.get(machine, f'of machine {machine}')}")
    flags = int.from_bytes(cubin[48:52], "little")
    low = flags & 0xFF
    return low if low >= 30 else (flags >> 8) & 0xFF  # CUDA 13 moved it


def resources(
    used: Mapping[str, int],
    sass: str,
    *,
    dynamic_shared_bytes: int,
    threads: int | None,
    capability: int,
    array_bytes: int = 0,
    spilled: int | None = None,
) -> Resources:
    """The tools' figures in our words.

    The stack holds spills, and arrays that are indexed at run time: `array_bytes` of them by the PTX. `spilled` is what
    the assembler says that it stored; where it was not asked, the SASS tells.
    """
    stack = used.get("STACK", 0)
    if not stack or spilled == 0:
        spill = 0
    elif spilled is not None and array_bytes:
        spill = min(stack - array_bytes, spilled)
    else:
        spill = _spill_bytes(sass, stack)
    named = [int(number, 16) for number in re.findall(r"\bBAR\.\S+ (0x[0-9a-f]+)", sass)]
    reserved = RESERVED_SHARED_BYTES if capability >= 90 and used.get("SHARED", 0) >= RESERVED_SHARED_BYTES else 0
    return Resources(
        registers=used["REG"],
        spill_bytes=spill,
        stack_bytes=stack,
        static_shared_bytes=used.get("SHARED", 0) - reserved,
        dynamic_shared_bytes=dynamic_shared_bytes,
        barriers=max(used.get("BARRIERS", 0), max(named, default=-1) + 1),  # before sm_90 only the code says
        threads=threads or used.get("THREADS"),
    )


def _spill_bytes(sass: str, stack_bytes: int) -> int:
    """A spill lies at a fixed place above the stack pointer R1; an array is indexed through another register.

    Where there are both, spills are the words that are loaded for the last time (LDL.LU), which an array's are not.

    >>> _spill_bytes("STL [R1+0x4], R2 ; LDL R2, [R1+0x4] ;", 8)
    8
    >>> _spill_bytes("STL [R1+0x84], R2 ; LDL.LU R2, [R1+0x84] ; STL [R1], R3 ; LDL.64 R4, [R5+0x8] ;", 136)
    4
    """
    accesses = _LOCAL.findall(sass)
    if any(register != "R1" for _, _, register, _ in accesses):
        last = [place for kind, suffixes, register, place in accesses if register == "R1" and ".LU" in suffixes]
        return min(stack_bytes, 4 * len(set(last)))
    return stack_bytes if accesses else 0


def entries(ptx: str) -> tuple[str, ...]:
    """The kernels of a PTX file, by symbol."""
    return tuple(_ENTRY.findall(ptx))


def ptx_of(ptx: str, symbol: str) -> str:
    """The file without the other kernels: their code would be counted as this one's."""
    kept, start = [], 0
    for mark in _ENTRY.finditer(ptx):
        if mark[1] != symbol:
            kept.append(ptx[start : mark.start()])
            start = _end(ptx, mark.end())
    return "".join((*kept, ptx[start:]))


def local_array_bytes(ptx: str) -> int:
    """
    >>> local_array_bytes("  .local .align 16 .b8 __local_depot0[128];")
    128
    """
    return sum(int(bits) // 8 * int(count) for bits, count in _ARRAY.findall(ptx))


def _end(ptx: str, start: int) -> int:
    """The index behind the brace that closes the next one to open."""
    depth = 0
    for mark in _BRACE.finditer(ptx, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if mark[0] == "}" and depth == 0:
            return mark.end()
    return len(ptx)


def assemble(ptx: str, capability: int) -> bytes:
    """PTX -> cubin by ptxas; what it complains of is the user's to mend."""
    return assembled(ptx, capability).cubin


def assembled(ptx: str, capability: int) -> Assembled:
    """The cubin, and what the assembler says of its spills."""
    target = re.search(r"^\s*\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    suffix = "a" if capability >= 90 and target and target[1].endswith("a") else ""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        file.write_text(ptx, encoding="utf-8")
        command = [_newest_ptxas(), f"-arch=sm_{capability}{suffix}", "-lineinfo", "-v", "-o", str(out), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            line = re.search(r", line (\d+); (?:error|fatal)\s*: (.+)", done.stderr)
            raise BadInput(f"ptxas: line {line[1]}: {line[2]}" if line else f"ptxas: {_first_line(done.stderr)}")
        return Assembled(cubin=out.read_bytes(), spilled=spills(done.stdout + done.stderr))


def spills(output: str) -> dict[str, int]:
    """Symbol -> bytes that spill stores move, as `ptxas -v` tells them.

    >>> spills("Function properties for f\\n  8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads")
    {'f': 8}
    """
    return {symbol: int(stores) or int(loads) for symbol, stores, loads in _SPILLS.findall(output)}


def _newest_ptxas() -> str:
    """Triton's wheel has two, and the one it calls Blackwell's reads newer PTX for every target."""
    try:
        return tool("ptxas-blackwell")
    except BadInput:
        return tool("ptxas")


def _first_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line or "fatal" in line), lines[0] if lines else "no message")


def _run(command: str, *words: str, file: bytes, suffix: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=suffix) as holder:
        holder.write(file)
        holder.flush()
        done = subprocess.run([command, *words, holder.name], capture_output=True, text=True, errors="replace")
    if done.returncode:
        complaint = _first_line(done.stderr).replace(holder.name, "the file")
        raise BadInput(
            _CUT_OFF if "does not contain device code" in complaint else f"{Path(command).name}: {complaint}"
        )
    return done.stdout
