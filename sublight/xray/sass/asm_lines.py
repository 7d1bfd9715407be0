"""Lines that LLVM gets wrong: of inline assembly it gives each next statement the next line of the source.

Triton writes a load without a mask as inline assembly, `mov` up to four times and then `ld`; so PTX, and the SASS from
it, have the load up to four lines below its own. Here the location of what surrounds the assembly is put back.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from sublight.backend import private
from sublight.xray.record import Code, Place
from sublight.xray.sass.instruction import Instruction, parse
from sublight.xray.sass.kinds import kind_of

_BEGIN, _END = "// begin inline asm", "// end inline asm"
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.MULTILINE)
_OPCODE = re.compile(r"\s*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z][\w.:]*)[\s;]")

_KEY = "sublight: no locations in inline assembly"

_Line = tuple[str, int]  # a file's last name, and a line in it


def read(code: Code) -> tuple[Instruction, ...]:
    """A kernel's instructions, with the lines that PTX shows to be wrong put right."""
    return _read(code.sass, code.ptx)


@functools.lru_cache(maxsize=4)  # a page reads its code five times
def _read(sass: str, ptx: str) -> tuple[Instruction, ...]:
    return righted(parse(sass), ptx)


def mended(ptx: str) -> str:
    """PTX without the locations inside inline assembly.

    >>> print(mended(".loc 1 53 9\\n// begin inline asm\\n.loc 1 54 9\\nld.global.b16 ...;\\n// end inline asm"))
    .loc 1 53 9
    // begin inline asm
    ld.global.b16 ...;
    // end inline asm
    """
    kept, is_inside = [], False
    for line in ptx.split("\n"):
        is_inside = _BEGIN in line or (is_inside and _END not in line)
        if not (is_inside and _LOC.match(line)):
            kept.append(line)
    return "\n".join(kept)


@contextlib.contextmanager
def right_lines() -> Iterator[None]:
    """What Triton compiles meanwhile has mended PTX, and so a cubin with the right lines; the code is the same."""

    def hook(*given: Any) -> tuple[str, str] | None:
        if not given:
            return _KEY, _KEY  # a part of the key in Triton's cache: other cubins of this kernel have the wrong lines
        stages = given[1]
        make = stages["ptx"]
        stages["ptx"] = lambda source, metadata: mended(make(source, metadata))
        return None

    kept = private.knobs.runtime.add_stages_inspection_hook
    private.knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        private.knobs.runtime.add_stages_inspection_hook = kept


def righted(instructions: Sequence[Instruction], ptx: str) -> tuple[Instruction, ...]:
    """Move what lies on a line where PTX means nothing of its sort to lie: loads, stores, and the rest."""
    meant: dict[tuple[_Line, str], Counter[int]] = {}
    for place, sort, line in _statements(ptx):
        meant.setdefault((place, sort), Counter())[line] += 1
    if all(set(lines) == {place[1]} for (place, _), lines in meant.items()):
        return tuple(instructions)
    return tuple(_moved(each, meant) for each in instructions)


def _moved(instruction: Instruction, meant: dict[tuple[_Line, str], Counter[int]]) -> Instruction:
    if not instruction.places:
        return instruction
    innermost, *outer = instruction.places
    sort = {"global load": "load", "global store": "store"}.get(kind_of(instruction), "other")
    lines = meant.get(((PurePath(innermost.file).name, innermost.line), sort), Counter())
    if not lines or innermost.line in lines or (sort == "other" and len(lines) > 1):
        return instruction
    place = Place(file=innermost.file, line=lines.most_common(1)[0][0])
    return replace(instruction, places=(place, *outer))


def _statements(ptx: str) -> Iterator[tuple[_Line, str, int]]:
    """Of each statement the line that PTX says, its sort, and the line that is meant."""
    names = {number: PurePath(name or folder).name for number, folder, name in _FILE.findall(ptx)}
    place: _Line = ("", 0)
    meant, is_inside = 0, False
    for line in ptx.split("\n"):
        is_inside = _BEGIN in line or (is_inside and _END not in line)
        if loc := _LOC.match(line):
            place = (names.get(loc[1], ""), int(loc[2]))
            meant = meant if is_inside else place[1]
        elif statement := _OPCODE.match(line):
            yield place, _sort(statement[1]), meant


def _sort(opcode: str) -> str:
    """
    >>> _sort("ld.global.L1::evict_first.v4.b32"), _sort("st.global.b16"), _sort("ld.shared.b32"), _sort("mov.u16")
    ('load', 'store', 'other', 'other')
    """
    first, *rest = opcode.split(".")
    return {"ld": "load", "st": "store"}.get(first, "other") if "global" in rest else "other"
