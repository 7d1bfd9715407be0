"""Whether the lanes of a warp ask for different addresses: each for its own, or all for one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sublight.xray.sass.instruction import Instruction

_REGISTER = re.compile(r"\bR(\d+)(\.64)?\b")
_NAME = re.compile(r"R\d+")
_PREDICATE = re.compile(r"P[0-6T]")
_LANE = re.compile(r"SR_(TID|LANEID|(EQ|LT|LE|GT|GE)MASK)")
_WIDE = {"WIDE": 2, "64": 2, "128": 4, "256": 8, "F64": 2}


class Lanes:
    """Follows registers back through the listing, from an address to what it was made of.

    A value is taken to come from the last instruction above that writes its register, whatever the branches between:
    rough, but a loop's counter leads to its first value, which is what counts. Uniform registers are one for the warp.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._instructions = instructions
        self._writers: dict[int, list[int]] = {}
        for index, each in enumerate(instructions):
            for register in _written(each):
                self._writers.setdefault(register, []).append(index)

    def differ(self, index: int) -> bool:
        """Whether the address of this load or store differs from lane to lane."""
        address = next((operand for operand in self._instructions[index].operands if "[" in operand), "")
        wanted = [(index, register) for register in _registers(address)]
        seen: set[tuple[int, int]] = set()
        while wanted:
            here = wanted.pop()
            if here in seen:
                continue
            seen.add(here)
            for writer in self._last_writers(*here):
                operands = self._instructions[writer].operands
                if any(_LANE.match(operand) for operand in operands):
                    return True
                wanted.extend((writer, register) for operand in operands[1:] for register in _registers(operand))
        return False

    def _last_writers(self, before: int, register: int) -> Iterator[int]:
        """The last one above, and while it is conditional the one above it too."""
        for writer in reversed(self._writers.get(register, ())):
            if writer < before:
                yield writer
                if not self._instructions[writer].predicate:
                    return


def _registers(operand: str) -> list[int]:
    """
    >>> _registers("desc[UR4][R2.64+0x8]"), _registers("-R7.reuse"), _registers("c[0x0][0x28]")
    ([2, 3], [7], [])
    """
    runs = [(int(number), 2 if pair else 1) for number, pair in _REGISTER.findall(operand)]
    return [number + more for number, count in runs for more in range(count)]


def _written(instruction: Instruction) -> range:
    """The registers that it writes: its first operand, or the second behind a predicate (SHFL PT, R3, …)."""
    words = instruction.operands[:2]
    if words and _PREDICATE.fullmatch(words[0]):
        words = words[1:]
    if not words or not _NAME.fullmatch(words[0]):
        return range(0)
    first = int(words[0][1:])
    wide = max((_WIDE.get(word, 1) for word in instruction.modifiers), default=1)
    return range(first, first + (2 if instruction.opcode == "CS2R" and "32" not in instruction.modifiers else wide))
