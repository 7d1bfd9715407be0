"""Which source line each line of a listing comes from: SASS, PTX and TTGIR all carry it, each in its own way.

A line that a helper was inlined for has a *chain* of places, innermost first: triton/language/standard.py:216, called
at softmax.py:99. The place that the kernel's author knows is the innermost one in his own file. Every function here
returns one entry for each of ``text.split("\\n")``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from pathlib import PurePath

from sublight.xray.record import Place

Chain = tuple[Place, ...]  # innermost first; empty: unknown

_SASS_COMMENT = re.compile(r'\s*//## File "([^"]*)", line (\d+)( inlined at )?')
_SASS_INSTRUCTION = re.compile(r"\s*\{?\s*/\*[0-9a-f]{4,}\*/")
_PTX_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.MULTILINE)
_PTX_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:[^/\n]*?\binlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_PTX_FUNCTION = re.compile(r"\s*(?:\.\w+\s+)*\.(?:entry|func)\b")
_PTX_INSTRUCTION = re.compile(r"\s*(?:\{\s*)?(?:@!?%\w+\s+)?[a-z][\w.]*(?:::[\w.]+)*[\s;]")  # a label ends in one colon
_ALIAS = re.compile(r"^#([\w$.]+) = loc\((.*)\)\s*$", re.MULTILINE)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_AT_LINE = re.compile(r":(\d+):\d+(?: to (?:\d+)?:\d+)?")
_NAME = re.compile(r"#([\w$.]+)")
_WORD = re.compile(r"[\w.]*")
_BETWEEN = re.compile(r"\s*(?:,|\bat\b)?\s*")


def lines_of_sass(text: str, file: str = "") -> list[Place | None]:
    """The place of each line of nvdisasm's listing; only instructions have one.

    >>> lines_of_sass('//## File "a.py", line 7\\n  /*0000*/  LDC R1, c[0x0][0x28] ;')
    [None, Place(file='a.py', line=7)]
    """
    return places(chains_of_sass(text), file)


def lines_of_ptx(text: str, file: str = "") -> list[Place | None]:
    """The place of each line of PTX; only instructions have one."""
    return places(chains_of_ptx(text), file)


def lines_of_ttgir(text: str, file: str = "") -> list[Place | None]:
    """The place of each line of Triton's representation."""
    return places(chains_of_ttgir(text), file)


def places(chains: Iterable[Chain], file: str = "") -> list[Place | None]:
    """Of each chain its innermost place in the file; where none is given, the file in which the kernel begins."""
    chains = list(chains)
    files = {place.file for chain in chains for place in chain}
    own = {name for name in files if same_file(name, file)} or {own_file(chains)}
    return [next((place for place in chain if place.file in own), chain[-1] if chain else None) for chain in chains]


def own_file(chains: Iterable[Chain]) -> str:
    """Where the kernel itself stands: what the first known line was inlined into in the end."""
    return next((chain[-1].file for chain in chains if chain), "")


@functools.lru_cache(maxsize=256)  # asked for every instruction
def same_file(one: str, other: str) -> bool:
    """Debug information has the whole path, users name a part of it.

    >>> same_file("/home/me/ops/add.py", "ops/add.py"), same_file("/me/ops/add.py", "old/add.py"), same_file("a.py", "")
    (True, False, False)
    """
    if one == other:
        return bool(one)
    first, second = (tuple(part for part in PurePath(name).parts if part != ".") for name in (one, other))
    shared = min(len(first), len(second))
    return shared > 0 and first[-shared:] == second[-shared:]


def chains_of_sass(text: str) -> list[Chain]:
    """By nvdisasm's comments; with ``-gi`` a comment that says "inlined at" goes on in the comment below it."""
    known = _Places()
    found: list[Chain] = []
    chain: Chain = ()
    goes_on = False
    for line in text.split("\n"):
        if comment := _SASS_COMMENT.match(line):
            place = known.at(comment[1], int(comment[2]))
            chain = (*(chain if goes_on else ()), *place)
            goes_on = comment[3] is not None
            found.append(())
        else:
            goes_on = False
            found.append(chain if _SASS_INSTRUCTION.match(line) else ())
    return found


def chains_of_ptx(text: str) -> list[Chain]:
    """By ``.loc``: what ``inlined_at`` names is the ``.loc`` of that position that came before."""
    names = {number: f"{folder}/{name}" if name else folder for number, folder, name in _PTX_FILE.findall(text)}
    known = _Places()
    last: dict[tuple[str, str, str], Chain] = {}
    found: list[Chain] = []
    chain: Chain = ()
    is_inline = False
    for line in text.split("\n"):
        is_inline = "// begin inline asm" in line or (is_inline and "// end inline asm" not in line)
        if is_inline:
            pass  # LLVM numbers the statements of inline assembly on: their line is that of what surrounds them
        elif loc := _PTX_LOC.match(line):
            number, row, column, *outer = loc.groups()
            into: Chain = ()
            if outer[0] is not None:
                into = last.get((outer[0], outer[1], outer[2]), known.at(names.get(outer[0], ""), int(outer[1])))
            chain = known.at(names.get(number, ""), int(row)) + into
            last[number, row, column] = chain
        elif _PTX_FUNCTION.match(line):
            chain = ()
        found.append(chain if _PTX_INSTRUCTION.match(line) else ())
    return found


def chains_of_ttgir(text: str) -> list[Chain]:
    """By the location that ends each line; a line that opens a region has the location that closes it."""
    locations = _Locations(dict(_ALIAS.findall(text)))
    found: list[Chain] = []
    opened: list[list[int]] = []
    for index, line in enumerate(text.split("\n")):
        at = -1 if line.startswith("#") else line.rfind("loc(")
        chain = locations.read(line[at + 4 :]) if at >= 0 else ()
        found.append(chain)
        words = line.strip()
        waiting = opened.pop() if words.startswith("}") and opened else []
        if words.endswith("{"):
            opened.append([*waiting, index])  # of `} else {` both wait for the last
            continue
        for begin in waiting:
            found[begin] = found[begin] or chain
    return found


class _Places:
    """One record for a place however often it is named; line 0 is the compiler's word for none."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Chain] = {}

    def at(self, file: str, line: int) -> Chain:
        if not file or line <= 0:
            return ()
        return self._made.setdefault((file, line), (Place(file=file, line=line),))


class _Locations:
    """MLIR's locations: a file's line, a name for another, a call site, several fused, an alias for any of them."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self._aliases = aliases
        self._resolved: dict[str, Chain] = {}
        self._places = _Places()

    def read(self, words: str) -> Chain:
        return self._parse(words, 0)[0]

    def _alias(self, name: str) -> Chain:
        if name not in self._resolved:
            self._resolved[name] = ()  # an alias that names itself says nothing
            self._resolved[name] = self.read(self._aliases.get(name, "unknown"))
        return self._resolved[name]

    def _parse(self, words: str, at: int) -> tuple[Chain, int]:
        """The chain that stands at a position, and where it ends."""
        if name := _NAME.match(words, at):
            return self._alias(name[1]), name.end()
        if quoted := _QUOTED.match(words, at):
            if line := _AT_LINE.match(words, quoted.end()):
                return self._places.at(quoted[1], int(line[1])), line.end()
            if words.startswith("(", quoted.end()):
                return self._inside(words, quoted.end() + 1, ")", _first)
            return (), quoted.end()
        if words.startswith("callsite(", at):
            return self._inside(words, at + len("callsite("), ")", _joined)
        if words.startswith("fused", at) and (bracket := words.find("[", at)) >= 0:
            return self._inside(words, bracket + 1, "]", _first)
        word = _WORD.match(words, at)
        return (), word.end() if word else at

    def _inside(self, words: str, at: int, close: str, together: Callable[[list[Chain]], Chain]) -> tuple[Chain, int]:
        """Those up to the closing bracket, apart by a comma or by `at`."""
        chains: list[Chain] = []
        while at < len(words) and words[at] != close:
            chain, end = self._parse(words, at)
            chains.append(chain)
            between = _BETWEEN.match(words, end)
            end = between.end() if between else end
            if end == at:  # nothing that we know: do not stay here
                break
            at = end
        return together(chains), at + 1


def _first(chains: list[Chain]) -> Chain:
    return next((chain for chain in chains if chain), ())


def _joined(chains: list[Chain]) -> Chain:
    return tuple(place for chain in chains for place in chain)
