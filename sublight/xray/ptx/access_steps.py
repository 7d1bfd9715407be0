"""Loads, stores, copies and atomics of a followed block: the bytes they move, and their addresses for the recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from sublight.xray.occupancy.sm import WARP
from sublight.xray.ptx.addresses import ADDRESS, Addresses, Elements
from sublight.xray.ptx.copy_steps import Copier
from sublight.xray.ptx.numbers import BITS, Array, Kind
from sublight.xray.record import AccessKind

if TYPE_CHECKING:
    from sublight.xray.ptx.entry import Instruction
    from sublight.xray.ptx.machine import Machine, Step
    from sublight.xray.ptx.operands import Operands, Target

_SPACES = ("global", "shared", "local", "param", "const")
_ATOMICS: dict[str, Callable[[Array, Array], Array]] = {
    **{"add": np.add, "min": np.minimum, "max": np.maximum, "exch": lambda old, new: new},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    "inc": lambda old, most: np.where(old >= most, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, most: np.where((old == 0) | (old > most), most, old - old.dtype.type(1)),
}


class Accessor(Addresses):
    """Makes the steps of memory instructions."""

    def __init__(self, machine: Machine, builder: Operands) -> None:
        super().__init__(machine, builder)
        self.parameters: dict[str, int] = {}
        self._copier = Copier(self)
        at = 0
        for parameter in machine.entry.parameters:
            align = min(parameter.bytes, 8) if parameter.count == 1 else 16
            at = -(-at // align) * align
            self.parameters[parameter.name] = at
            at += parameter.bytes

    def step(self, index: int, instruction: Instruction) -> Step | None:
        """None: it does not touch memory."""
        name = instruction.parts[0]
        if name in ("ld", "ldu"):
            return self._load(index, instruction)
        if name == "st":
            return self._store(index, instruction)
        if name in ("atom", "red"):
            return self._atomic(index, instruction)
        if name in ("ldmatrix", "stmatrix"):
            return self._matrix(index, instruction)
        return self._copier.step(index, instruction)

    # -------------------------------------------------------------------------------------------- instructions

    def _load(self, index: int, instruction: Instruction) -> Step:
        parts, operands = instruction.parts, instruction.operands
        space = _space(parts)
        kind = Kind(parts[-1])
        targets = [self.builder.target(word) for word in operands[0].strip("{}").split(",")]
        if space == "param":
            return self._load_parameter(operands[1], kind, targets)
        source, offset = self.address(operands[1])
        count, is_signed = len(targets), kind.family == "s"
        machine, write = self.machine, self.builder.write
        is_needed = index in self.builder.needed.results

        def step() -> None:
            at, why = self.lanes_at(source, offset)
            on = machine.active() if why is None else machine.active() & (why == 0)
            where, at = self.resolve(space, at, on)
            self.note(index, "" if space == "const" else where, "load", at, on, count * kind.bytes, why)
            if not is_needed:
                return
            for target, (bits, doubt) in zip(targets, self.fetch(where, at, on, kind.bytes, count), strict=True):
                if why is not None:
                    doubt = why if doubt is None else np.maximum(doubt, why)
                write(target, bits, doubt, is_signed=is_signed)

        return step

    def _load_parameter(self, text: str, kind: Kind, targets: list[Target]) -> Step:
        """A kernel's parameter, the same for every lane; what a function that was called returned is not known."""
        match = ADDRESS.fullmatch(text)
        assert match
        machine = self.machine
        first = self.parameters.get(match[1])
        called = np.array([machine.reason("what a function that is not inlined returned")], np.uint8)
        offset = int(match[2] or 0)
        loaded: Elements = []
        for k in range(len(targets)):
            if first is None:
                loaded.append((np.zeros(1, BITS[kind.bytes]), called))
            else:
                loaded.append(machine.start.parameters.load(np.array([first + offset + k * kind.bytes]), kind.bytes))

        def step() -> None:
            for target, (bits, why) in zip(targets, loaded, strict=True):
                self.builder.write(target, bits, why, is_signed=kind.family == "s")

        return step

    def _store(self, index: int, instruction: Instruction) -> Step:
        parts, operands = instruction.parts, instruction.operands
        space, kind = _space(parts), Kind(parts[-1])
        if space == "param" or "async" in parts or "bulk" in parts:  # a call's argument; another block's shared memory
            return lambda: None
        source, offset = self.address(operands[0])
        values = [self.builder.source(word, kind) for word in operands[1].strip("{}").split(",")]
        machine, spaces = self.machine, self.builder.needed.spaces

        def step() -> None:
            at, why = self.lanes_at(source, offset)
            on = machine.active() if why is None else machine.active() & (why == 0)
            where, at = self.resolve(space, at, on)
            self.note(index, where, "store", at, on, len(values) * kind.bytes, why)
            if where in spaces:
                self.keep(where, at, on, [(self.builder.read(one), machine.whys[one.slot]) for one in values])

        return step

    def _atomic(self, index: int, instruction: Instruction) -> Step:
        """Lane after lane, as one legal order; the other blocks of the grid have not come yet."""
        parts, operands = instruction.parts, list(instruction.operands)
        space = _space(parts)
        target = self.builder.target(operands.pop(0)) if parts[0] == "atom" else self.builder.target("")
        kind = Kind(parts[-1])
        source, offset = self.address(operands[0])
        given = [self.builder.source(word, kind) for word in operands[1].strip("{}").split(",")]
        name = next((word for word in parts if word in (*_ATOMICS, "cas")), "")
        other = self.builder.source(operands[2], kind) if name == "cas" else None
        machine, read = self.machine, self.builder.read
        foreign = np.array([machine.reason(f"{instruction.opcode}, which is not emulated")], np.uint8)
        simple = bool(name) and len(given) == 1 and not kind.pair
        slots = tuple(one.slot for one in (*given, *([other] if other else [])))
        needed = self.builder.needed

        def step() -> None:
            at, why = self.lanes_at(source, offset)
            on = machine.active() if why is None else machine.active() & (why == 0)
            where, at = self.resolve(space, at, on)
            self.note(index, where, "atomic", at, on, len(given) * kind.bytes, why)
            if index not in needed.results and where not in needed.spaces:
                return
            bits, mine = np.zeros(machine.lanes, BITS[kind.bytes]), machine.why(slots)
            mine = None if mine is None else np.broadcast_to(mine, at.shape)
            values = np.broadcast_to(kind.numbers(read(given[0])), at.shape) if simple else None
            swaps = np.broadcast_to(kind.numbers(read(other)), at.shape) if other else None
            whys = np.zeros(machine.lanes, np.uint8) if why is None else why.copy()
            for lanes in _rounds(at, on):
                ((old, of_old),) = self.fetch(where, at, lanes, kind.bytes, 1)
                bits[lanes] = old[lanes]
                doubt = np.zeros(machine.lanes, np.uint8) if of_old is None else of_old
                doubt = doubt if mine is None else np.maximum(doubt, mine)
                whys[lanes] = doubt[lanes]
                new = old
                if values is None:
                    doubt = np.maximum(doubt, foreign)
                else:
                    before = kind.numbers(old)
                    after = (
                        _ATOMICS[name](before, values) if swaps is None else np.where(before == values, swaps, before)
                    )
                    new = kind.bits(after)
                self.keep(where, at, lanes, [(new, doubt if doubt.any() else None)])
            self.builder.write(target, bits, whys if whys.any() else None)

        return step

    def _matrix(self, index: int, instruction: Instruction) -> Step:
        """ldmatrix, stmatrix of 8 × 8 matrices of 16 bits: lanes 8 i … 8 i + 7 point to the rows of matrix i."""
        parts, operands = instruction.parts, instruction.operands
        is_load = parts[0] == "ldmatrix"
        pointer, listed = (operands[1], operands[0]) if is_load else (operands[0], operands[1])
        words = listed.strip("{}").split(",")
        source, offset = self.address(pointer)
        matrices = next((int(part[1:]) for part in parts if part in ("x1", "x2", "x4")), 1)
        is_usual, is_transposed = "m8n8" in parts and parts[-1] == "b16", "trans" in parts
        machine, builder = self.machine, self.builder
        targets = [builder.target(word) for word in words]
        given = [] if is_load else [builder.source(word, Kind("b32")) for word in words]
        lane = np.arange(machine.lanes)
        warp, within = lane - lane % WARP, lane % WARP
        kind: AccessKind = "matrix load" if is_load else "matrix store"
        foreign = np.array([machine.reason(f"{instruction.opcode}, which is not emulated")], np.uint8)
        is_needed = index in builder.needed.results if is_load else "shared" in builder.needed.spaces

        def step() -> None:
            at, why = self.lanes_at(source, offset)
            if why is not None:
                machine.recorder.note_unknown(index, "shared", kind, 16, self.reason_of(why))
            else:
                machine.recorder.note(index, "shared", kind, at, machine.active(), 16, matrices=matrices)
            for i in range(len(words) if is_needed else 0):
                if why is not None or not is_usual:
                    if is_load:
                        builder.write(targets[i], np.zeros(1, np.uint32), foreign if why is None else why)
                    continue
                halves = []
                for half in range(2):
                    row, column = within // 4, 2 * (within % 4) + half
                    if is_transposed:
                        row, column = column, row
                    halves.append(at[warp + 8 * i + row] + 2 * column)
                if is_load:
                    low, high = (self.fetch("shared", place, machine.active(), 2, 1)[0] for place in halves)
                    doubt = low[1] if high[1] is None else high[1] if low[1] is None else np.maximum(low[1], high[1])
                    builder.write(
                        targets[i], low[0].astype(np.uint32) | (high[0].astype(np.uint32) << np.uint32(16)), doubt
                    )
                else:
                    bits, doubt = builder.read(given[i]), machine.whys[given[i].slot]
                    for half, place in enumerate(halves):
                        piece = (bits >> np.uint32(16 * half)).astype(np.uint16)
                        self.keep("shared", place, machine.active(), [(piece, doubt)])

        return step


def _space(parts: tuple[str, ...]) -> str:
    """
    >>> _space(("ld", "shared::cta", "b32")), _space(("ld", "volatile", "global", "u64")), _space(("ld", "f32"))
    ('shared', 'global', '')
    """
    return next((name for part in parts if (name := part.partition("::")[0]) in _SPACES), "")


def _rounds(at: Array, on: Array) -> list[Array]:
    """Lanes whose addresses differ go together; those that share one, one after another."""
    lanes = np.flatnonzero(on)
    order = lanes[np.argsort(at[lanes], kind="stable")]
    sorted_at = at[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = sorted_at[1:] != sorted_at[:-1]
    rank = np.arange(len(order)) - np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    masks = []
    for number in range(int(rank.max()) + 1 if len(rank) else 0):
        mask = np.zeros(len(at), np.bool_)
        mask[order[rank == number]] = True
        masks.append(mask)
    return masks
