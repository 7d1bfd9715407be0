"""A learner's file to a library that plays it, by a host compiler, and to a GPU's code, by nvcc where there is one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from sublight.errors import BadInput
from sublight.extensions import build as extensions
from sublight.learn.verdict import Fault

HERE = Path(__file__).parent
FLAGS = ("-std=c++20", "-O1", "-g1", "-U_FORTIFY_SOURCE", "-fPIC", "-w", "-pthread")
WATCH = ("-fsanitize=thread", "-fsanitize=alignment")  # calls before every access, which watched.h answers
LIMIT_S = 60.0
_ERROR = re.compile(r"^([^\s:]+):(\d+):(?:\d+:)? (?:fatal )?error: (.+)$", re.MULTILINE)


def host_compiler() -> str:
    """GCC: the watch lives on its instrumentation."""
    compiler = extensions.host_compiler()
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    if "Free Software Foundation" not in shown:
        raise BadInput(f"{compiler} is not GCC, which CUDA C++ is checked with: install g++, or set CXX to it")
    return compiler


def library(program: str, folder: Path, name: str) -> tuple[Path | None, list[Fault]]:
    """The submission as a library; or what the compiler says of it, at the learner's line."""
    compiler = host_compiler()
    source, made, out = folder / "played.cpp", folder / "played.o", folder / "played.so"
    source.write_text(program, encoding="utf-8")
    includes = (f"-I{HERE}", f"-I{extensions.FOLDER}")
    report = _run([compiler, *FLAGS, *WATCH, *includes, "-c", "-o", str(made), str(source)], folder)
    if report is None:
        report = _run([compiler, "-shared", "-pthread", "-o", str(out), str(made)], folder)
    return (out, []) if report is None else (None, [_fault(report, name)])


def _run(command: list[str], folder: Path) -> str | None:
    """None where it succeeds, else what it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the compiler took more than {LIMIT_S:g} s"
    return None if done.returncode == 0 else done.stderr or done.stdout or "the compiler failed without a word"


def _fault(report: str, name: str) -> Fault:
    """The first complaint at a line of the learner's; played C++ is named as the CUDA C++ that it came from."""
    for file, line, text in _ERROR.findall(report):
        if Path(file).name == name:
            return Fault(kind="compile", line=int(line), text=_plain(text))
    first = _ERROR.search(report)
    return Fault(kind="compile", text=_plain(first[3] if first else report.strip().splitlines()[0]))


def _plain(words: str) -> str:
    """
    >>> _plain("too few arguments to function \u2018void add(const float*, float*)\u2019")
    "too few arguments to function 'void add(const float*, float*)'"
    """
    return words.replace("\u2018", "'").replace("\u2019", "'")


def line_of(library: Path, addresses: list[int], base: int, name: str) -> list[int]:
    """The learner's lines of these addresses of a loaded library, the innermost; 0 where there is none."""
    if not addresses:
        return []
    offsets = [hex(max(address - base - 1, 0)) for address in addresses]  # a return address: the call is before it
    command = ["addr2line", "-i", "-a", "-e", str(library), *offsets]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return [0] * len(addresses)
    lines, found = [], 0
    for word in shown.splitlines():
        if word.startswith("0x") and ":" not in word:
            lines.append(0)
        elif not lines[-1] and (place := re.match(rf"(?:.*/)?{re.escape(name)}:(\d+)", word)):
            lines[-1] = int(place[1])
            found += 1
    return lines if len(lines) == len(addresses) else [0] * len(addresses)
