"""From an operand in brackets to memory: every lane's address, the space it lies in, and what is there."""

from __future__ import annotations

import re

import numpy as np

from sublight.xray.ptx.machine import Machine
from sublight.xray.ptx.memory import LOCAL_REGION, REGION_SHIFT, SHARED_BYTES, SHARED_REGION, Memory
from sublight.xray.ptx.numbers import BITS, Array, Kind, distinct
from sublight.xray.ptx.operands import Operands, Source
from sublight.xray.record import AccessKind, Space

Elements = list[tuple[Array, Array | None]]  # bits and reasons, one pair an element of a lane's vector
ADDRESS = re.compile(r"\[([^\]+-]*)((?:[+-]-?\w+)*)\]")
_INSIDE = np.int64((1 << REGION_SHIFT) - 1)


class Addresses:
    """What all instructions that touch memory share."""

    def __init__(self, machine: Machine, builder: Operands) -> None:
        self.machine, self.builder = machine, builder

    def address(self, text: str) -> tuple[Source, np.int64]:
        match = ADDRESS.fullmatch(text)
        if not match:
            raise ValueError(text)
        offset = sum(int(piece.replace("+", "").replace("--", ""), 0) for piece in re.findall(r"[+-]-?\w+", match[2]))
        kind = Kind("b32" if self.builder.entry.registers.get(match[1]) in ("b32", "u32", "s32") else "b64")
        return self.builder.source(match[1], kind), np.int64(offset)

    def lanes_at(self, source: Source, offset: np.int64) -> tuple[Array, Array | None]:
        """Every lane's address, and why it is not known."""
        machine = self.machine
        at = self.builder.read(source).astype(np.int64) + offset
        why = machine.whys[source.slot]
        if machine.doubt is not None:
            why = machine.doubt if why is None else np.maximum(why, machine.doubt)
        if why is not None:
            why = np.where(machine.active(), why, np.uint8(0))
            why = why if why.any() else None
        return np.broadcast_to(at, (machine.lanes,)), why

    def note(
        self,
        index: int,
        space: str,
        kind: AccessKind,
        at: Array,
        on: Array,
        width: int,
        why: Array | None,
        *,
        copied: tuple[Array, Array] | None = None,
    ) -> None:
        if space not in ("global", "shared"):
            return
        named: Space = "global" if space == "global" else "shared"
        if why is not None:
            self.machine.recorder.note_unknown(index, named, kind, width, self.reason_of(why))
        else:
            self.machine.recorder.note(index, named, kind, at, on, width, copied=copied)

    def reason_of(self, why: Array) -> str:
        what = "its address depends" if self.machine.doubt is None else "which lanes run it depends"
        return f"{what} on {self.machine.start.reasons[int(why.max())]}"

    def resolve(self, space: str, at: Array, on: Array) -> tuple[str, Array]:
        """A generic address lies in the space that its upper bits name; constants lie beside global memory."""
        if space == "":
            region = int(at[on.argmax()] >> REGION_SHIFT)
            space = {SHARED_REGION: "shared", LOCAL_REGION: "local"}.get(region, "global")
            at = at if space == "global" else at & _INSIDE
        return space, at

    def pieces(self, space: str, at: Array, on: Array) -> list[tuple[Memory, Array, Array, str]]:
        """Memory, offsets into it, and the lanes that are in it; a lane outside of everything is in none."""
        machine = self.machine
        if space == "shared":
            inside = on & (at >= 0) & (at < SHARED_BYTES)
            return [(machine.shared, at + machine.block * SHARED_BYTES, inside, "")]
        if space == "local":
            room = machine.local_bytes
            return [(machine.local, at + np.arange(machine.lanes) * room, on & (at >= 0) & (at < room), "")]
        pieces = []
        regions = at >> REGION_SHIFT
        for number in distinct(regions[on]).tolist():
            region = machine.start.memory.region_of(number)
            if region:
                pieces.append((region.memory, at & _INSIDE, on & (regions == number), region.name))
        return pieces

    def fetch(self, space: str, at: Array, on: Array, width: int, count: int) -> Elements:
        """Elements of each lane that is on; what lies outside of the data is unknown."""
        machine = self.machine
        outside = np.uint8(machine.reason("memory outside of the tensors that were given"))
        pieces = self.pieces(space, at, on)
        out: Elements = []
        for k in range(count):
            bits, whys = np.zeros(machine.lanes, BITS[width]), np.full(machine.lanes, outside)
            for memory, offsets, lanes, _ in pieces:
                place = offsets + k * width
                size = 1 << REGION_SHIFT if memory.data is None else len(memory.data)
                fine = lanes & (place + width <= size) & (place % width == 0)
                chosen = np.flatnonzero(fine)
                loaded, why = memory.load(place[chosen], width)
                bits[chosen] = loaded
                whys[chosen] = 0 if why is None else why
            whys[~on] = 0
            out.append((bits, whys if whys.any() else None))
        return out

    def keep(self, space: str, at: Array, on: Array, elements: Elements) -> None:
        for memory, offsets, lanes, _ in self.pieces(space, at, on):
            for k, (bits, why) in enumerate(elements):
                width = bits.dtype.itemsize
                place = offsets + k * width
                size = 0 if memory.data is None else len(memory.data)
                chosen = np.flatnonzero(lanes & (place + width <= size) & (place % width == 0))
                bits, why = (
                    np.broadcast_to(bits, at.shape),
                    None if why is None else np.broadcast_to(why, at.shape),
                )
                memory.store(place[chosen], bits[chosen], None if why is None else why[chosen])
