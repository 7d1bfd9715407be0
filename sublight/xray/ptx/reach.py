"""Where the lanes of a warp go: of every memory instruction, the bytes that each of the 32 asks for.

One block is followed through the PTX, as in `accesses`; of each instruction the first warp that runs it is kept, as it
is the first time. It is what Triton's layouts say of a Triton kernel, read off the addresses of any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from sublight.errors import BadInput
from sublight.xray.occupancy.sm import WARP
from sublight.xray.ptx.accesses import most_steps_of
from sublight.xray.ptx.entry import Entry, parse_entry
from sublight.xray.ptx.leaving import leaving_early
from sublight.xray.ptx.memory import REGION_SHIFT, GlobalMemory
from sublight.xray.ptx.needed import needed
from sublight.xray.ptx.numbers import Array
from sublight.xray.ptx.start import start_of
from sublight.xray.ptx.steps import follow
from sublight.xray.record import AccessKind, Code, Place, Space

_INSIDE = (1 << REGION_SHIFT) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """One memory instruction: where each lane of a warp goes."""

    place: Place | None
    instruction: str  # ld.global.v4.b32
    space: Space
    kind: AccessKind
    width: int  # bytes a lane
    warp: int = 0
    argument: str = ""  # whose memory it is; of global memory alone
    offsets: tuple[int | None, ...] = ()  # bytes from its beginning, by lane; None: the lane takes no part
    unknown: str = ""  # why there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The memory instructions that a block came to, in the order of the code."""

    instructions: tuple[Reach, ...]
    stopped: str = ""  # why it was not followed to its end


class _Recorder:
    """Keeps of each instruction what the first warp asks for."""

    def __init__(self, entry: Entry, memory: GlobalMemory) -> None:
        self._entry, self._memory = entry, memory
        self.reaches: dict[tuple[int, Space], Reach] = {}

    def note(
        self,
        index: int,
        space: Space,
        kind: AccessKind,
        addresses: Array,
        active: Array,
        width: int,
        *,
        matrices: int = 0,
        copied: tuple[Array, Array] | None = None,
    ) -> None:
        if (index, space) in self.reaches or not active.any():
            return
        taking_part = active.reshape(-1, WARP)
        warp = int(taking_part.any(1).argmax())
        lanes = [
            int(address) if on else None
            for address, on in zip(addresses.reshape(-1, WARP)[warp], taking_part[warp], strict=True)
        ]
        regions = {address >> REGION_SHIFT for address in lanes if address is not None}
        if len(regions) > 1:
            self.note_unknown(index, space, kind, width, "its lanes go to several tensors")
            return
        region = self._memory.region_of(regions.pop()) if space == "global" else None
        self.reaches[index, space] = self._reach(
            index,
            space,
            kind,
            16 if matrices else width,  # a lane of ldmatrix names a line of 16 bytes, and gets others
            warp=warp,
            argument=region.name if region else "",
            offsets=tuple(None if address is None else address & _INSIDE for address in lanes),
        )

    def note_operands(self, index: int, warps: int, passes: int) -> None:
        self.note_unknown(index, "shared", "matrix operand", 0, "tensor cores read it, no lane")

    def note_unknown(self, index: int, space: Space, kind: AccessKind, width: int, reason: str) -> None:
        self.reaches.setdefault((index, space), self._reach(index, space, kind, width, unknown=reason))

    def _reach(
        self,
        index: int,
        space: Space,
        kind: AccessKind,
        width: int,
        *,
        warp: int = 0,
        argument: str = "",
        offsets: tuple[int | None, ...] = (),
        unknown: str = "",
    ) -> Reach:
        instruction = self._entry.instructions[index]
        return Reach(
            place=instruction.place,
            instruction=instruction.opcode,
            space=space,
            kind=kind,
            width=width,
            warp=warp,
            argument=argument,
            offsets=offsets,
            unknown=unknown,
        )


def reaches(code: Code) -> Reached:
    """BadInput says why nothing can be followed."""
    if not code.ptx:
        raise BadInput(f"{code.name}: only the binary is at hand, and addresses are followed through PTX: give the .cu")
    entry = leaving_early(parse_entry(code.ptx, code.symbol))
    start = start_of(code, entry, blocks=1)
    if isinstance(start, str):
        raise BadInput(f"{code.name}: {start}")
    x, y, z = start.threads
    lanes_of_block = -(-x * y * z // WARP) * WARP
    recorder = _Recorder(entry, start.memory)
    stops = follow(entry, start, recorder, most_steps=most_steps_of(lanes_of_block, 1), only=needed(entry))
    return Reached(
        instructions=tuple(recorder.reaches[key] for key in sorted(recorder.reaches)),
        stopped=stops[0].reason if stops else "",
    )
