"""Bytes that a thread asks for before it must wait: the loads that are under way at once.

A load's answer takes hundreds of clocks; what is asked for meanwhile is in flight at no cost. The SASS tells how much:
a load is under way until the first instruction that touches what it brings, an asynchronous copy until a wait leaves
too few groups of copies for its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sublight.xray.sass.instruction import Instruction
from sublight.xray.sass.kinds import bytes_per_thread, kind_of
from sublight.xray.sass.loops import graph_of, reverse_postorder

_REGISTER = re.compile(r"\bR(\d+)(\.64)?\b")
_COPIES_LEFT = re.compile(r"SB0,\s*(0x[0-9a-f]+|\d+)")
_BULK_LOADS = ("UTMALDG", "UBLKCP")
_MATRIX_REGISTERS = 4  # of an operand, at most, that is not an accumulator
_ROUNDS = 2  # through the code: the second knows what a loop's turn before has left under way


@dataclass(slots=True)
class _State:
    """What is under way at a place of the code."""

    loads: dict[int, int] = field(default_factory=dict)  # instruction -> bytes, in the order that they were asked for
    waiting: dict[int, int] = field(default_factory=dict)  # register -> which load brings it
    groups: tuple[int, ...] = (0,)  # bytes of asynchronous copies, by the group that they were committed in

    @property
    def bytes(self) -> int:
        return sum(self.loads.values()) + sum(self.groups)

    def used(self, registers: Iterable[int]) -> None:
        """Answers come in order: with the last of these, all that was asked for before it is there."""
        brought = {self.waiting[register] for register in registers if register in self.waiting}
        if brought:
            order = list(self.loads)
            last = max(order.index(load) for load in brought)
            self.loads = {load: self.loads[load] for load in order[last + 1 :]}
            self.waiting = {register: load for register, load in self.waiting.items() if load in self.loads}

    def joined(self, other: _State) -> _State:
        """Where two ways meet, all that may be under way on either; of two loads into one register, one."""
        rivals = {load for register, load in other.waiting.items() if self.waiting.get(register, load) != load}
        loads = {load: size for load, size in other.loads.items() if load not in rivals}
        waiting = {register: load for register, load in other.waiting.items() if load not in rivals}
        more = self.groups if sum(self.groups) >= sum(other.groups) else other.groups
        return _State(loads=self.loads | loads, waiting=self.waiting | waiting, groups=more)


def bytes_ahead(instructions: Sequence[Instruction]) -> int | None:
    """The most bytes of global loads and asynchronous copies that are under way at once, for one thread.

    None where bulk copies (TMA) bring data: one thread asks for a tile, and how large it is the SASS does not say.
    """
    if not instructions:
        return 0
    if any(each.opcode in _BULK_LOADS for each in instructions):
        return None
    graph, ends = graph_of(instructions)
    order = reverse_postorder(graph)
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for after in graph[block]:
            before[after].append(block)
    left: dict[int, _State] = {}
    most = 0
    for _ in range(_ROUNDS):
        for block in order:
            state = _State()
            for number, origin in enumerate(origin for origin in before[block] if origin in left):
                state = state.joined(left[origin]) if number else left[origin].joined(_State())
            for index in range(block, ends[block]):
                _step(state, index, instructions[index])
                most = max(most, state.bytes)
            left[block] = state
    return most


def _step(state: _State, index: int, each: Instruction) -> None:
    kind = kind_of(each)
    is_load = kind == "global load"
    width = bytes_per_thread(each)
    brought = _brought(each, width) if is_load else range(0)
    state.used([*_read(each, kind, width, is_load=is_load), *brought])
    if is_load:
        state.loads.pop(index, None)  # of the turn before: in order it is now the last
        state.loads[index] = width
        state.waiting |= dict.fromkeys(brought, index)
    elif kind == "async copy":
        state.groups = (*state.groups[:-1], state.groups[-1] + width)
    elif each.opcode == "LDGDEPBAR":
        state.groups = (*state.groups, 0)
    elif each.opcode == "DEPBAR" and (left := _COPIES_LEFT.search(", ".join(each.operands))):
        kept, under_way = int(left[1], 0), state.groups[:-1]
        state.groups = (*under_way[max(0, len(under_way) - kept) :], state.groups[-1])


def _brought(load: Instruction, width: int) -> range:
    match = next((_REGISTER.search(operand) for operand in load.operands if _REGISTER.fullmatch(operand)), None)
    first = int(match[1]) if match else -1
    return range(first, first + max(1, width // 4)) if match else range(0)


def _read(each: Instruction, kind: str, width: int, *, is_load: bool) -> list[int]:
    """Registers that an instruction names, written ones too: they must have come before they are written again."""
    names = [register for operand in each.operands[is_load:] for register in _REGISTER.finditer(operand)]
    several = _MATRIX_REGISTERS if kind == "tensor core" else max(1, width // 4) if kind.endswith("store") else 1
    return [int(register[1]) + word for register in names for word in range(2 if register[2] else several)]
