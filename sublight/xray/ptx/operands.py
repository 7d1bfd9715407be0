"""The operands of instructions: where each lies, how it is read and written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sublight.xray.occupancy.sm import WARP
from sublight.xray.ptx.entry import BYTES, Instruction
from sublight.xray.ptx.machine import Machine
from sublight.xray.ptx.memory import SHARED_START
from sublight.xray.ptx.needed import Needed
from sublight.xray.ptx.numbers import BITS, SIGNED, Array, Kind, immediate


@dataclass(frozen=True, slots=True)
class Source:
    """Where an operand lies, and the width it is read with."""

    slot: int
    dtype: np.dtype[np.generic]
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A register that is written: its slot (-1: nobody reads it) and how narrow results are widened."""

    slot: int
    bytes: int = 0


class Operands:
    """Knows names: registers, symbols, special registers and constants all have slots."""

    def __init__(self, machine: Machine, needed: Needed) -> None:
        self.machine = machine
        self.entry = machine.entry
        self.needed = needed
        self._slots: dict[str, int] = {}
        self.symbols = dict(machine.start.symbols)
        self._assigned = {name for one in machine.entry.instructions for name in named(one)}
        self._unwritten = np.full(machine.lanes, machine.reason("a register that nobody wrote"), np.uint8)
        self._lay_out()

    def _lay_out(self) -> None:
        """Addresses of shared and local variables; what the launch sizes comes last."""
        shared, local = SHARED_START, 0
        for variable in sorted(self.entry.variables, key=lambda variable: variable.bytes == 0):
            if variable.space == "shared":
                align = max(variable.align, 1024 if variable.bytes == 0 else 1)
                shared = -(-shared // align) * align
                self.symbols[variable.name] = shared
                shared += variable.bytes
            elif variable.space == "local":
                local = -(-local // variable.align) * variable.align
                self.symbols[variable.name] = local
                local += variable.bytes
        self.machine.local_bytes = local = -(-local // 16) * 16
        if local:
            size = local * self.machine.lanes
            memory = self.machine.local
            memory.data, memory.is_ours = np.zeros(size, np.uint8), True
            memory.why = np.full(size, memory.reason, np.uint8)

    def source(self, text: str, kind: Kind) -> Source:
        dtype = np.dtype(np.bool_) if kind.family == "pred" else BITS[kind.bytes]
        if text.startswith("!"):
            return Source(self._register(text[1:]), dtype, True)
        if text in self.entry.registers:
            return Source(self._register(text), dtype)
        key = f"{text}:{kind.name}"
        if key not in self._slots:
            self._slots[key] = self._fresh(self._constant(text, kind).astype(dtype), None)
        return Source(self._slots[key], dtype)

    def read(self, source: Source) -> Array:
        bits = self.machine.values[source.slot]
        if bits.dtype != source.dtype:
            bits = bits.astype(source.dtype)
        return ~bits if source.is_negated else bits

    def target(self, text: str) -> Target:
        if text in self.entry.registers:
            return Target(self._register(text), BYTES.get(self.entry.registers[text], 0))
        return Target(-1)

    def write(self, target: Target, bits: Array, why: Array | None, *, is_signed: bool = False) -> None:
        if target.slot >= 0 and bits.dtype != np.bool_ and bits.dtype.itemsize != target.bytes:
            if is_signed:
                bits = bits.view(SIGNED[bits.dtype.itemsize]).astype(SIGNED[target.bytes])
            bits = bits.astype(BITS[target.bytes])
        self.machine.put(target.slot, bits, why)

    def _register(self, name: str) -> int:
        if name not in self._slots:
            kind = self.entry.registers[name]
            dtype = np.dtype(np.bool_) if kind == "pred" else BITS.get(BYTES.get(kind, 8), BITS[8])
            why = self._unwritten if name in self._assigned else None  # never written: any value will do
            self._slots[name] = self._fresh(np.zeros(self.machine.lanes, dtype), why)
        return self._slots[name]

    def _fresh(self, bits: Array, why: Array | None) -> int:
        self.machine.values.append(bits)
        self.machine.whys.append(why)
        return len(self.machine.values) - 1

    def _constant(self, text: str, kind: Kind) -> Array:
        name, _, offset = text.partition("+")
        if name in self.symbols:
            return np.array([self.symbols[name] + int(offset or 0)], np.uint64)
        if text.startswith("%"):
            return self.machine.special(text)
        if text.upper().startswith("WARP_SZ"):
            return np.array([WARP], np.uint32)
        return immediate(text, kind)


def named(instruction: Instruction) -> list[str]:
    """The registers of the first operand, which is the result's."""
    return instruction.operands[0].strip("{}").replace("|", ",").split(",") if instruction.operands else []
