"""Follow blocks of a kernel through its PTX, all their threads at once: numpy arrays over the lanes.

PTX is what the compiler really made of the kernel, with layouts, vector widths and swizzles lowered, so the addresses
are the true ones. Registers hold bits; beside a register whose value is not known on some lanes lies the number of the
reason for each. Lanes that part at a branch form groups; the group that is furthest behind runs first, so they meet
again. Barriers hold a group until the others come. What waits for another block's answer never ends: steps are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sublight.xray.occupancy.sm import WARP
from sublight.xray.ptx.entry import Entry
from sublight.xray.ptx.memory import SHARED_BYTES, GlobalMemory, Memory
from sublight.xray.ptx.numbers import Array
from sublight.xray.record import AccessKind, Place, Space

MOST_REASONS = 255
Step = Callable[[], None]
PLAIN, BRANCH, EXIT, BARRIER, WAIT, TABLE = range(6)
_AXES = {"x": 0, "y": 1, "z": 2}


class Recorder(Protocol):
    """Is told of every memory instruction as it runs."""

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
    ) -> None: ...

    def note_operands(self, index: int, warps: int, passes: int) -> None: ...

    def note_unknown(self, index: int, space: Space, kind: AccessKind, width: int, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A launch: what the followed blocks begin with."""

    threads: tuple[int, int, int]
    grid: tuple[int, int, int]
    blocks: tuple[tuple[int, int, int], ...]  # those that are followed
    memory: GlobalMemory
    parameters: Memory
    reasons: list[str]  # why something is not known, by number; 0 is none
    symbols: dict[str, int] = field(default_factory=dict)  # global and constant variables -> address


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where a block could not be followed any further."""

    block: tuple[int, int, int]
    place: Place | None
    reason: str


@dataclass(slots=True)
class _Waiting:
    """A group at a barrier (`barrier` is its number) or at an mbarrier (-1)."""

    barrier: int
    count: int  # threads it takes; 0: all
    pc: int
    mask: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One instruction, ready to run."""

    kind: int
    step: Step | None = None
    predicate: int = -1  # a register's slot
    is_negated: bool = False
    target: int = -1  # of a branch; of a jump through a table, the slot of its index
    barrier: int = 0
    count: int = 0
    exit: int = -1  # of a loop that waits for another block's word: where it goes on
    written: tuple[int, ...] = ()  # the registers that such a loop changes; the targets of a table
    join: int = -1  # of a branch over sums alone: where both ways meet
    between: tuple[int, ...] = ()  # the registers that either way writes


class Machine:
    """The state of the followed blocks; `emulate_build` makes steps that change it."""

    def __init__(self, entry: Entry, start: Start, recorder: Recorder) -> None:
        self.entry, self.start, self.recorder = entry, start, recorder
        per_block = int(np.prod(start.threads))
        padded = -(-per_block // WARP) * WARP
        self.lanes = padded * len(start.blocks)
        self.thread = np.tile(np.arange(padded), len(start.blocks))  # within its block
        self.block = np.repeat(np.arange(len(start.blocks)), padded)
        self.padded = padded
        self.values: list[Array] = []
        self.whys: list[Array | None] = []
        self.everyone = np.ones(self.lanes, np.bool_)
        self.mask: Array | None = None  # lanes that run now; None: all
        self.doubt: Array | None = None  # lanes of which it is not known whether they run
        never = self.reason("shared memory that nobody has written")
        size = SHARED_BYTES * len(start.blocks)
        self.shared = Memory(np.zeros(size, np.uint8), np.full(size, never, np.uint8), is_ours=True)
        self.local = Memory(None, reason=self.reason("local memory that was not written"))
        self.local_bytes = 0
        self.stops: dict[int, Stop] = {}
        self.steps = 0  # instructions that the groups came by
        self.ran = 0  # those of them that were computed
        self._live = self.thread < per_block
        self._arrived: dict[tuple[int, int], int] = {}
        self._rounds: dict[int, list[Array]] = {}  # what the registers of a waiting loop held when it last came round

    # -------------------------------------------------------------------------------------------- values

    def reason(self, text: str) -> int:
        reasons = self.start.reasons
        if text in reasons:
            return reasons.index(text)
        if len(reasons) >= MOST_REASONS:
            return MOST_REASONS - 1
        reasons.append(text)
        return len(reasons) - 1

    def active(self) -> Array:
        return self.everyone if self.mask is None else self.mask

    def is_whole(self) -> Array:
        """Lanes of whose block every lane that has not left runs now."""
        missing = self._live & ~self.active()
        return ~np.isin(self.block, np.unique(self.block[missing]))

    def put(self, slot: int, bits: Array, why: Array | None) -> None:
        """Write a register on the lanes that run."""
        if slot < 0:
            return
        if self.doubt is not None:
            why = joined(why, self.doubt)
        if bits.shape[0] != self.lanes:
            bits = np.broadcast_to(bits, (self.lanes,))
        if why is not None and why.shape[0] != self.lanes:
            why = np.broadcast_to(why, (self.lanes,))
        if self.mask is not None:
            bits = np.where(self.mask, bits, self.values[slot])
            old = self.whys[slot]
            if why is not None or old is not None:
                none = np.zeros(1, np.uint8)
                why = np.where(self.mask, none if why is None else why, none if old is None else old)
                why = why if why.any() else None
        self.values[slot] = bits
        self.whys[slot] = why

    def why(self, slots: tuple[int, ...]) -> Array | None:
        doubt: Array | None = None
        for slot in slots:
            doubt = joined(doubt, self.whys[slot])
        return doubt

    def special(self, text: str) -> Array:
        """Special registers; a clock stands still."""
        start = self.start
        name, _, axis = text[1:].partition(".")
        along = _AXES.get(axis, 0)
        x, y, _ = start.threads
        if name == "tid":
            place = (self.thread % x, self.thread // x % y, self.thread // (x * y))[along]
            return place.astype(np.uint32)
        if name == "ctaid":
            return np.array([block[along] for block in start.blocks], np.uint32)[self.block]
        sizes = {"ntid": start.threads[along], "nctaid": start.grid[along], "nwarpid": self.padded // WARP}
        sizes |= {"nclusterid": start.grid[along], "cluster_nctaid": 1, "cluster_nctarank": 1, "nsmid": 1}
        if name == "clusterid":
            return np.array([block[along] for block in start.blocks], np.uint32)[self.block]
        if name == "laneid":
            return (self.thread % WARP).astype(np.uint32)
        if name == "warpid":
            return (self.thread // WARP).astype(np.uint32)
        if name.startswith("lanemask_"):
            lane = (self.thread % WARP).astype(np.uint64)
            below = (np.uint64(1) << lane) - np.uint64(1)
            own = np.uint64(1) << lane
            table = {"eq": own, "lt": below, "le": below | own, "gt": ~(below | own), "ge": ~below}
            return (table[name.removeprefix("lanemask_")] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        return np.array([sizes.get(name, 0)], np.uint32)

    # -------------------------------------------------------------------------------------------- control

    def run(self, program: list[Line], *, most_steps: int) -> tuple[Stop, ...]:
        """From the first instruction until every lane has left, or cannot go on; the stops say where and why."""
        groups: dict[int, Array] = {0: self._live.copy()}
        waiting: list[_Waiting] = []
        with np.errstate(all="ignore"):
            while groups or waiting:
                if not groups:
                    self._release(groups, waiting)
                    continue
                pc = min(groups)
                mask = groups.pop(pc) & self._live
                if mask.any():
                    self._advance(program, pc, mask, groups, waiting)
                if self.ran > most_steps:
                    self._stop(self._live, pc, f"it was still running after {self.steps:,} instructions")
                    break
        self.mask = None
        return tuple(self.stops.values())

    def _advance(
        self, program: list[Line], pc: int, mask: Array, groups: dict[int, Array], waiting: list[_Waiting]
    ) -> None:
        """Run one group until it branches, waits, leaves, or meets another."""
        limit = min(groups, default=len(program))
        self.mask = None if mask.all() else mask
        while pc < limit:
            line = program[pc]
            self.steps += 1
            if line.kind == PLAIN:
                pc += 1
                if line.step is None:  # nobody needs what it computes
                    continue
                self.ran += 1
                if line.predicate < 0:
                    line.step()
                else:
                    self._guarded(line, mask)
                continue
            self.ran += 1
            if line.join >= 0:
                mask = self._skipped(line, mask, groups)
            on = self._condition(line, mask, pc)
            mask = mask & self._live
            if line.kind in (BARRIER, WAIT):
                if line.step and on.any():
                    self.mask = None if on.all() else on
                    line.step()
                    self.mask = None if mask.all() else mask
                if (groups or waiting) and on.any():
                    _merge(groups, pc + 1, mask & ~on)
                    waiting.append(_Waiting(line.barrier if line.kind == BARRIER else -1, line.count, pc + 1, on))
                    return
                pc += 1
                continue
            if line.kind == BRANCH:
                spins = bool(line.written) and on.any() and self._spins(line, pc)
                _merge(groups, line.exit if spins else line.target, on)
            elif line.kind == TABLE:
                self._jump(line, on, pc, groups)
            else:
                self._live = self._live & ~on
            _merge(groups, pc + 1, mask & ~on)
            return
        if pc < len(program):
            _merge(groups, pc, mask)

    def _spins(self, line: Line, pc: int) -> bool:
        """Did a loop come round with nothing changed? Another block would end it, and what it hears is unknown."""
        now = [self.values[slot] for slot in line.written]
        before = self._rounds.get(pc)
        self._rounds[pc] = now
        if before is None or not all(map(np.array_equal, now, before)):
            return False
        why = np.array([self.reason("what another block answers")], np.uint8)
        for slot in line.written:
            self.put(slot, self.values[slot], why)
        return True

    def _guarded(self, line: Line, mask: Array) -> None:
        """A predicated instruction; where the predicate is not known, what it writes is not known either."""
        assert line.step is not None
        wanted = self.values[line.predicate] ^ line.is_negated
        why = self.whys[line.predicate]
        before = self.mask
        on = mask & wanted
        if why is not None:
            doubt = np.where(mask, why, np.uint8(0))
            if doubt.any():
                self.doubt = doubt
                on = on | (doubt > 0)
        if on.any():
            self.mask = None if on.all() else on
            line.step()
        self.mask, self.doubt = before, None

    def _jump(self, line: Line, on: Array, pc: int, groups: dict[int, Array]) -> None:
        """Each lane to the target that its index names."""
        why = self.whys[line.target]
        if why is not None and (doubtful := on & (why > 0)).any():
            self._stop(doubtful, pc, f"a jump depends on {self.start.reasons[int(why[doubtful].max())]}")
        for number, target in enumerate(line.written):
            _merge(groups, target, on & self._live & (self.values[line.target] == number))

    def _skipped(self, line: Line, mask: Array, groups: dict[int, Array]) -> Array:
        """Lanes that do not know which way go on where the ways meet, without what either computes; the others stay."""
        why = self.whys[line.predicate]
        if why is None or not (doubtful := mask & (why > 0)).any():
            return mask
        before, self.mask = self.mask, doubtful
        for slot in line.between:
            self.put(slot, self.values[slot], why)
        self.mask = before
        _merge(groups, line.join, doubtful)
        return mask & ~doubtful

    def _condition(self, line: Line, mask: Array, pc: int) -> Array:
        """The lanes of the group for which a branch, exit or barrier is taken; blocks that do not know are stopped."""
        if line.predicate < 0:
            return mask
        why = self.whys[line.predicate]
        if why is not None:
            doubtful = mask & (why > 0)
            if doubtful.any():
                number = int(why[doubtful].max())
                self._stop(doubtful, pc, f"a branch depends on {self.start.reasons[number]}")
        return mask & (self.values[line.predicate] ^ line.is_negated) & self._live

    def _stop(self, lanes: Array, pc: int, reason: str) -> None:
        instructions = self.entry.instructions
        place = instructions[pc].place if pc < len(instructions) else None
        for block in np.unique(self.block[lanes]):
            name = self.start.blocks[block]
            self.stops.setdefault(int(block), Stop(block=name, place=place, reason=reason))
            self._live = self._live & (self.block != block)

    def _release(self, groups: dict[int, Array], waiting: list[_Waiting]) -> None:
        """Everybody waits: let those go whose barrier is full, else all that wait for copies, else nobody can."""
        for one in waiting:
            one.mask = one.mask & self._live
        waiting[:] = [one for one in waiting if one.mask.any()]
        freed = False
        for block, number in {(int(b), one.barrier) for one in waiting for b in np.unique(self.block[one.mask])}:
            if number < 0:
                continue
            here = [one for one in waiting if one.barrier == number]
            lanes = [one.mask & (self.block == block) for one in here]
            came = sum(int(mask.sum()) for mask in lanes) + self._arrived.pop((block, number), 0)
            needed = max(one.count for one in here) or int((self._live & (self.block == block)).sum())
            if came >= needed:
                for one, mask in zip(here, lanes, strict=True):
                    _merge(groups, one.pc, mask)
                    one.mask = one.mask & ~mask
                    freed = True
        if not freed:
            for one in waiting:
                if one.barrier < 0:
                    _merge(groups, one.pc, one.mask)
                    one.mask = np.zeros_like(one.mask)
                    freed = True
        if not freed and waiting:
            self._stop(self._live, waiting[0].pc - 1, "its warps wait at barriers for one another")
        waiting[:] = [one for one in waiting if (one.mask & self._live).any()]

    def arrive(self, barrier: int) -> None:
        for block in np.unique(self.block[self.active()]):
            key = (int(block), barrier)
            self._arrived[key] = self._arrived.get(key, 0) + int((self.active() & (self.block == block)).sum())


def joined(one: Array | None, other: Array | None) -> Array | None:
    """Unknown where either is."""
    if one is None:
        return other
    return one if other is None else np.maximum(one, other)


def _merge(groups: dict[int, Array], pc: int, mask: Array) -> None:
    if mask.any():
        groups[pc] = groups[pc] | mask if pc in groups else mask
