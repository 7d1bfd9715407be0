"""What lanes tell one another: shuffles, votes, reductions, elections of a warp, votes of a block. 32 lanes a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from sublight.xray.occupancy.sm import WARP
from sublight.xray.ptx.numbers import Array, Kind

if TYPE_CHECKING:
    from sublight.xray.ptx.entry import Instruction
    from sublight.xray.ptx.machine import Machine, Step
    from sublight.xray.ptx.operands import Operands

_VOTES: dict[str, Callable[[Array], object]] = {"popc": np.sum, "and": np.all, "or": np.any}


def shuffle_sources(mode: str, lanes: int, b: Array, c: Array) -> tuple[Array, Array]:
    """Which lane (of all) each lane hears, and whether it is in range: shfl.sync's up, down, bfly and idx.

    >>> source, in_range = shuffle_sources("up", 32, np.array([1], np.uint32), np.array([0], np.uint32))
    >>> source[:4].tolist(), in_range[:4].tolist()
    ([0, 0, 1, 2], [False, True, True, True])
    """
    lane = np.arange(lanes) % WARP
    step, clamp, segment = b.astype(np.int64) & 31, c.astype(np.int64) & 31, (c.astype(np.int64) >> 8) & 31
    lowest = lane & segment
    highest = lowest | (clamp & ~segment)
    if mode == "up":
        heard = lane - step
        in_range = heard >= highest
    else:
        heard = {"down": lane + step, "bfly": lane ^ step}.get(mode, lowest | (step & ~segment))
        in_range = heard <= highest
    source = np.arange(lanes) - lane + np.where(in_range, heard, lane)
    return source, np.broadcast_to(in_range, (lanes,))


def ballot(votes: Array, active: Array) -> Array:
    """A bit for each active lane that votes yes, the same word for the whole warp."""
    bits = (votes & active).reshape(-1, WARP).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)
    return np.repeat(bits.sum(1).astype(np.uint32), WARP)


def vote(mode: str, votes: Array, active: Array) -> Array:
    votes, rows = votes.reshape(-1, WARP), active.reshape(-1, WARP)
    every, any_one = (votes | ~rows).all(1), (votes & rows).any(1)
    verdict = {"all": every, "any": any_one, "uni": every | ~any_one}[mode]
    return np.repeat(verdict, WARP)


def elected(active: Array) -> Array:
    """The first active lane of each warp."""
    rows = active.reshape(-1, WARP)
    chosen = np.zeros(rows.shape, np.bool_)
    chosen[np.arange(len(rows)), rows.argmax(1)] = True
    return (chosen & rows).reshape(-1)


def first_lanes(active: Array) -> Array:
    """The number of each warp's first active lane."""
    return np.repeat(active.reshape(-1, WARP).argmax(1).astype(np.uint32), WARP)


def reduced(name: str, numbers: Array, active: Array) -> Array:
    """redux.sync over the active lanes."""
    function = {
        **{"add": np.add, "min": np.fmin, "max": np.fmax},
        **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    }[name]
    rows, on = numbers.reshape(-1, WARP), active.reshape(-1, WARP)
    out = np.zeros(rows.shape, numbers.dtype)
    for row, result, lit in zip(rows, out, on, strict=True):
        if lit.any():
            result[:] = function.reduce(row[lit], dtype=numbers.dtype)
    return out.reshape(-1)


def matched(numbers: Array, active: Array) -> Array:
    """match.any: the lanes of the warp that hold the same number."""
    rows, on = numbers.reshape(-1, WARP), active.reshape(-1, WARP)
    same = (rows[:, :, None] == rows[:, None, :]) & on[:, None, :]
    words: Array = (same.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(2).astype(np.uint32)
    return words.reshape(-1)


def spread(whys: Array) -> Array:
    """What one lane does not know, no lane of the warp knows."""
    return np.repeat(whys.reshape(-1, WARP).max(1), WARP)


class WarpSteps:
    """Makes the steps of the instructions that join lanes."""

    def __init__(self, machine: Machine, builder: Operands) -> None:
        self.machine, self.builder = machine, builder

    def step(self, instruction: Instruction) -> Step | None:
        """None: it is none of these, or not emulated."""
        match instruction.parts[0]:
            case "shfl":
                return self._shuffle(instruction)
            case "vote" | "activemask":
                return self._vote(instruction)
            case "redux":
                return self._reduce(instruction)
            case "elect":
                return self._elect(instruction)
            case "match":
                return self._match(instruction)
        return None

    def _shuffle(self, instruction: Instruction) -> Step:
        mode, operands, u32 = instruction.parts[-2], instruction.operands, Kind("b32")
        first, _, second = operands[0].partition("|")
        targets = self.builder.target(first), self.builder.target(second)
        a, b, c = (self.builder.source(text, u32) for text in operands[1:4])
        machine = self.machine
        silent = machine.reason("what a lane that is off would have said")

        def step() -> None:
            heard, in_range = shuffle_sources(mode, machine.lanes, self.builder.read(b), self.builder.read(c))
            bits = np.broadcast_to(self.builder.read(a), (machine.lanes,))[heard]
            of_a = machine.whys[a.slot]
            why = None if of_a is None else np.broadcast_to(of_a, (machine.lanes,))[heard]
            whys = [each for each in (why, machine.why((b.slot, c.slot))) if each is not None]
            if machine.mask is not None:
                off = ~machine.mask[heard]
                if (off & machine.mask).any():
                    whys.append(np.where(off, np.uint8(silent), np.uint8(0)))
            self.builder.write(targets[0], bits, np.maximum.reduce(whys) if whys else None)
            self.builder.write(targets[1], in_range, None)

        return step

    def _vote(self, instruction: Instruction) -> Step:
        parts, operands = instruction.parts, instruction.operands
        mode = "ballot" if parts[0] == "activemask" or "ballot" in parts else parts[-2]
        target = self.builder.target(operands[0])
        votes = self.builder.source(operands[1] if len(operands) > 1 else "1", Kind("pred"))

        def step() -> None:
            active = self.machine.active()
            cast = np.broadcast_to(self.builder.read(votes), active.shape)
            of_votes = self.machine.whys[votes.slot]
            why = None if of_votes is None else spread(np.where(active, of_votes, np.uint8(0)))
            self.builder.write(target, ballot(cast, active) if mode == "ballot" else vote(mode, cast, active), why)

        return step

    def _reduce(self, instruction: Instruction) -> Step:
        kind = Kind(instruction.parts[-1])
        target, a = self.builder.target(instruction.operands[0]), self.builder.source(instruction.operands[1], kind)
        name = next(word for word in instruction.parts if word in ("add", "min", "max", "and", "or", "xor"))

        def step() -> None:
            active = self.machine.active()
            numbers = np.broadcast_to(kind.numbers(self.builder.read(a)), active.shape)
            of_a = self.machine.whys[a.slot]
            why = None if of_a is None else spread(np.where(active, of_a, np.uint8(0)))
            self.builder.write(target, kind.bits(reduced(name, numbers, active)), why)

        return step

    def _elect(self, instruction: Instruction) -> Step:
        first, _, second = instruction.operands[0].partition("|")
        targets = self.builder.target(first), self.builder.target(second)

        def step() -> None:
            self.builder.write(targets[0], first_lanes(self.machine.active()), None)
            self.builder.write(targets[1], elected(self.machine.active()), None)

        return step

    def _match(self, instruction: Instruction) -> Step | None:
        if "any" not in instruction.parts:
            return None
        kind = Kind(instruction.parts[-1])
        target, a = self.builder.target(instruction.operands[0]), self.builder.source(instruction.operands[1], kind)

        def step() -> None:
            active, of_a = self.machine.active(), self.machine.whys[a.slot]
            numbers = np.broadcast_to(self.builder.read(a), active.shape)
            self.builder.write(target, matched(numbers, active), None if of_a is None else spread(of_a))

        return step

    def counted(self, instruction: Instruction) -> Step:
        """bar.red over a block: known where all of it comes together, else a later comer's word is missing."""
        parts, operands, machine = instruction.parts, instruction.operands, self.machine
        target, votes = self.builder.target(operands[0]), self.builder.source(operands[-1], Kind("pred"))
        function = next(one for word, one in _VOTES.items() if word in parts)
        later = machine.reason("what warps say that come later to a barrier")

        def step() -> None:
            cast = np.broadcast_to(self.builder.read(votes), (machine.lanes,))
            why = np.where(machine.is_whole(), np.uint8(0), np.uint8(later))
            of_votes = machine.whys[votes.slot]
            bits: Array = np.zeros(machine.lanes, np.bool_ if "pred" in parts else np.uint32)
            for block in range(len(machine.start.blocks)):
                here = machine.block == block
                on = here & machine.active()
                if on.any():
                    bits[here] = function(cast[on])
                    if of_votes is not None:
                        why[here] = np.maximum(why[here], np.broadcast_to(of_votes, here.shape)[on].max())
            self.builder.write(target, bits, why if why.any() else None)

        return step
