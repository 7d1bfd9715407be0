"""Kernels of a CUDA C++ file, by nvcc: one run gives the PTX and the cubin."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sublight.backend.record import compilable
from sublight.errors import BadInput
from sublight.gpus import Gpu
from sublight.xray import binary, build
from sublight.xray.complaint import first_line
from sublight.xray.inputs.binary_files import bare, chosen, demangled, read_text
from sublight.xray.record import Code

_ERROR = re.compile(r"^(.+?)\((\d+)\): (?:catastrophic |fatal )?error\s*(?:#[\w-]+)?:\s*(.+)$", re.MULTILINE)
_HOST_ERROR = re.compile(r"^(.+?):(\d+)(?::\d+)?: (?:fatal )?error: (.+)$", re.MULTILINE)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_QUALIFIERS = {"const", "volatile", "__restrict__", "__restrict", "restrict", "struct", "__grid_constant__"}
_NUMBERS = {
    *("bool", "char", "short", "int", "long", "unsigned", "signed", "float", "double", "half", "__half"),
    *("size_t", "ssize_t", "ptrdiff_t", "__nv_bfloat16", "std", "cuda"),
    *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}


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
    text = _COMMENT.sub(" ", read_text(file))
    for gpu in gpus:
        cubin, ptx, output = _compiled(nvcc, file, compilable(gpu), flags)
        symbols = binary.entries(ptx)
        if not symbols:
            raise BadInput(
                f"{file} has no kernel: a template needs an instance, such as template __global__ void k<float>(…)"
            )
        names = demangled(symbols)
        wanted = chosen(kernel, names, file)
        codes = build.codes(
            cubin, gpu, ptx=ptx, dynamic_shared_bytes=shared_bytes, threads=threads, names=names,
            spilled=binary.spills(output),
        )  # fmt: skip
        found += [
            replace(code, file=str(file.resolve()), signature=_signature(code, text))
            for code in codes
            if code.symbol in wanted
        ]
    return tuple(found)


def _signature(code: Code, text: str) -> dict[str, str]:
    """Argument -> type as the source has them; nothing where it does not say, as of a macro."""
    head = re.search(r"\.entry\s+" + re.escape(code.symbol) + r"\s*\(([^)]*)\)", code.ptx)
    name = bare(code.name).split("::")[-1]
    for declared in re.finditer(r"__global__\b[^;{}]*?\b" + re.escape(name) + r"\s*\(", text):
        arguments = [_argument(part) for part in parts(inside(text, declared.end()))]
        if all(arguments) and len(arguments) == (head[1].count(".param") if head else 0):
            return dict(each for each in arguments if each)
    return {}


def _argument(words: str) -> tuple[str, str] | None:
    """Name and type of `const float* __restrict__ x`; no type where the words do not say whether it is a pointer.

    >>> _argument("const float* __restrict__ x"), _argument("size_t n = 1"), _argument("Table t"), _argument("int")
    (('x', 'float*'), ('n', 'size_t'), ('t', ''), None)
    """
    words = words.partition("=")[0].strip()
    declared = re.fullmatch(r"(.*[\s*&])([A-Za-z_]\w*)\s*((?:\[[^\]]*\])*)", words, re.DOTALL)
    if not declared:
        return None
    plain = [word for word in re.findall(r"\w+", declared[1]) if word not in _QUALIFIERS]
    if "*" in declared[1] or declared[3]:
        return declared[2], f"{' '.join(plain)}*"
    return declared[2], " ".join(plain) if plain and set(plain) <= _NUMBERS else ""


def parts(words: str) -> list[str]:
    """At commas outside of brackets.

    >>> parts("std::array<int, 2> a, int n")
    ['std::array<int, 2> a', ' int n']
    """
    found, depth = [""], 0
    for letter in words:
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [part for part in found if part.strip()]


def inside(text: str, start: int) -> str:
    """Up to the bracket that closes the one before `start`.

    >>> inside("f(a(b), c) {", 2)
    'a(b), c'
    """
    depth = 1
    for mark in re.compile(r"[()]").finditer(text, start):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return text[start : mark.start()]
    return ""


def _compiled(nvcc: str, file: Path, capability: int, flags: Sequence[str]) -> tuple[bytes, str, str]:
    arch = f"sm_{capability}{'a' if capability >= 90 else ''}"  # what only this architecture has may be used
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.cubin"
        command = [
            *(nvcc, "-cubin", "-lineinfo", f"-arch={arch}", "-Xptxas", "-v", "-keep", "-keep-dir", folder),
            *("-I", str(file.resolve().parent), *flags, "-o", str(out), str(file.resolve())),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        output = done.stdout + done.stderr
        if done.returncode:
            raise BadInput(_what_nvcc_says(output, file))
        (ptx,) = Path(folder).glob("*.ptx")
        return out.read_bytes(), ptx.read_text(encoding="utf-8", errors="replace"), output


def _what_nvcc_says(output: str, file: Path) -> str:
    if error := _ERROR.search(output) or _HOST_ERROR.search(output):
        return f"{error[1]}:{error[2]}: nvcc: {error[3]}"
    line = next((line for line in output.splitlines() if "error" in line or "fatal" in line), first_line(output))
    return f"{file}: nvcc: {line.strip()}"
