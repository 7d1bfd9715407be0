"""What must be computed to know every address, guard and branch; the rest of a kernel's arithmetic need not be.

Where a kernel's sums and products never come to an address, following them changes nothing that is counted: they are
most of its instructions. Registers are followed back from the addresses, whichever way the code runs; a load that is
needed makes every store to that kind of memory needed, whatever its address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sublight.xray.ptx.entry import Entry, Instruction

_NAME = re.compile(r"[%$][\w$]+(?:@\d+)?")
_ADDRESS = re.compile(r"\[[^\]]*\]")
_ALWAYS = ("bra", "brx", "ret", "exit", "trap", "bar", "barrier", "mbarrier", "cp")  # and all that they read
_ACCESSES = ("ld", "ldu", "st", "atom", "red", "ldmatrix", "stmatrix", "cp", "wmma", "wgmma")
_LOADS = ("ld", "ldu", "atom", "ldmatrix")
_STORES = ("st", "atom", "red", "stmatrix")
SPACES = frozenset({"global", "shared", "local"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Instructions by index whose results are wanted, and the memories whose contents are."""

    results: frozenset[int]
    spaces: frozenset[str]

    def is_step(self, index: int, instruction: Instruction) -> bool:
        """Whether it is run at all: an access is always, if only for its address."""
        return index in self.results or instruction.parts[0] in (*_ALWAYS, *_ACCESSES)


def everything(entry: Entry) -> Needed:
    return Needed(results=frozenset(range(len(entry.instructions))), spaces=SPACES)


def needed(entry: Entry) -> Needed:
    """
    >>> from sublight.xray.ptx.entry import parse_entry
    >>> found = parse_entry(".visible .entry k(.param .u64 p) { .reg .b64 %rd<9>; .reg .b32 %r<9>; "
    ...     "ld.param.u64 %rd1, [p]; ld.global.b32 %r1, [%rd1]; add.s64 %rd2, %rd1, 64; add.f32 %r2, %r1, %r1; "
    ...     "st.global.b32 [%rd2], %r2; ret; }")
    >>> sorted(needed(found).results), sorted(needed(found).spaces)
    ([0, 2], [])
    """
    listed = entry.instructions
    wanted: set[str] = set()
    results: set[int] = set()
    spaces: set[str] = set()
    for index, one in enumerate(listed):
        name = one.parts[0]
        if name in (*_ALWAYS, *_ACCESSES):
            wanted.update(_names((one.predicate,)))
            wanted.update(_names(one.operands if name in _ALWAYS else _ADDRESS.findall(" ".join(one.operands))))
        if name == "bra" and entry.labels[one.operands[0]] <= index:
            results.update(_watching(entry, entry.labels[one.operands[0]], index))
    writes = [frozenset(_names(one.operands[:1])) if _writes(one) else frozenset() for one in listed]
    reads = [_names((one.predicate, *one.operands)) for one in listed]
    count = -1
    while len(wanted) + len(results) + len(spaces) != count:  # a loop may carry a need back
        count = len(wanted) + len(results) + len(spaces)
        for index in reversed(range(len(listed))):
            name = listed[index].parts[0]
            if index in results or not wanted.isdisjoint(writes[index]):
                results.add(index)
                wanted.update(reads[index])
                if name in _LOADS:
                    spaces.update(_spaces(listed[index]))
            elif name in _STORES and spaces & _spaces(listed[index]):
                wanted.update(reads[index])
            elif name == "cp" and "shared" in spaces:
                spaces.add("global")
    return Needed(results=frozenset(results), spaces=frozenset(spaces))


def _watching(entry: Entry, first: int, last: int) -> Iterable[int]:
    """A loop that looks at memory others may change ends where nothing changes: all of it is wanted."""
    body = entry.instructions[first : last + 1]
    looks = any(
        one.parts[0] == "atom" or (one.parts[0] == "ld" and {"volatile", "acquire", "relaxed", "mmio"} & set(one.parts))
        for one in body
    )
    return range(first, last + 1) if looks else ()


def _writes(one: Instruction) -> bool:
    """Whether the first operand is a result."""
    return bool(one.operands) and not one.operands[0].startswith("[") and one.parts[0] not in ("red", "bra", "brx")


def _names(operands: Iterable[str]) -> list[str]:
    return [name for operand in operands for name in _NAME.findall(operand)]


def _spaces(one: Instruction) -> frozenset[str]:
    """The memory that it touches: any, where only the address says which; none, where it is a parameter's."""
    if one.parts[0] in ("ldmatrix", "stmatrix"):
        return frozenset({"shared"})
    named = {word for part in one.parts if (word := part.partition("::")[0]) in (*SPACES, "param", "const")}
    return frozenset(named & SPACES) if named else SPACES
