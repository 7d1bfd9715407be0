"""Bytes that a thread asks for before it must wait: the longest run of loads until a value of one of them is used.

A load's answer takes hundreds of clocks; what is asked for meanwhile is in flight at no cost. The SASS tells how much:
loads are counted from each one until the first instruction that reads what one of them brings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sublight.xray.sass.instruction import Instruction
from sublight.xray.sass.kinds import bytes_per_thread, kind_of

_REGISTER = re.compile(r"\bR(\d+)\b")
_COPIES_LEFT = re.compile(r"SB0,\s*(0x[0-9a-f]+|\d+)")


def bytes_ahead(instructions: Sequence[Instruction]) -> int:
    """The most bytes of global loads and asynchronous copies that are under way at once, for one thread.

    Bulk copies (TMA) are not counted: one thread asks for a whole tile.
    """
    waiting: dict[int, int] = {}  # register -> which load brings it
    loads: dict[int, int] = {}  # load -> bytes
    groups: list[int] = [0]  # bytes of asynchronous copies, by the group that they were committed in
    most = 0
    for number, each in enumerate(instructions):
        kind = kind_of(each)
        reads = each.operands[1:] if kind == "global load" else each.operands
        used = {waiting[register] for register in _registers(reads) if register in waiting}
        if used:  # answers come in order: with one of them, all that were asked for before are there
            loads = {load: size for load, size in loads.items() if load > max(used)}
            waiting = {register: load for register, load in waiting.items() if load in loads}
        if kind == "global load":
            width = bytes_per_thread(each)
            loads[number] = width
            first = next(iter(_registers(each.operands[:1])), None)
            if first is not None:
                waiting |= {first + word: number for word in range(max(1, width // 4))}
        elif kind == "async copy":
            groups[-1] += bytes_per_thread(each)
        elif each.opcode == "LDGDEPBAR":
            groups.append(0)
        elif each.opcode == "DEPBAR" and (left := _COPIES_LEFT.search(", ".join(each.operands))):
            kept = int(left[1], 0)
            groups = [*groups[len(groups) - 1 - kept : -1], groups[-1]] if kept < len(groups) - 1 else groups
        most = max(most, sum(loads.values()) + sum(groups))
    return most


def _registers(operands: Sequence[str]) -> list[int]:
    return [int(number) for operand in operands for number in _REGISTER.findall(operand)]
