"""PTX instructions -> steps of the machine: operands become slots once, so that a step is little more than numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sublight.xray.ptx.access_steps import Accessor
from sublight.xray.ptx.arithmetic import BOOLEANS, compared, meaning, three_way
from sublight.xray.ptx.conversion import Meaning
from sublight.xray.ptx.entry import Entry, Instruction
from sublight.xray.ptx.machine import (
    BARRIER,
    BRANCH,
    EXIT,
    PLAIN,
    TABLE,
    WAIT,
    Line,
    Machine,
    Recorder,
    Start,
    Step,
    Stop,
    joined,
)
from sublight.xray.ptx.memory import LOCAL_REGION, REGION_SHIFT, SHARED_REGION
from sublight.xray.ptx.needed import Needed, everything
from sublight.xray.ptx.numbers import BITS, Array, Kind
from sublight.xray.ptx.operands import Operands, named
from sublight.xray.ptx.warp import WarpSteps

_IGNORED = (  # change no register or memory that is followed here, unless a vector is their first operand
    *("fence", "membar", "griddepcontrol", "setmaxnreg", "prefetch", "prefetchu", "createpolicy", "discard"),
    *("applypriority", "nanosleep", "pmevent", "mbarrier", "tensormap", "brkpt", "wgmma", "tcgen05"),
)
_MORE_THAN_SUMS = (
    *("bra", "brx", "ret", "exit", "trap", "call", "bar", "barrier", "mbarrier", "ld", "st", "atom", "red", "cp"),
    *("ldmatrix", "stmatrix", "shfl", "vote", "redux", "elect", "match", "mma", "wgmma", "tcgen05"),
)
_WATCHING = {"volatile", "acquire", "relaxed", "mmio"}


def follow(
    entry: Entry, start: Start, recorder: Recorder, *, most_steps: int, only: Needed | None = None
) -> tuple[Stop, ...]:
    """Run the blocks; what they access is told to the recorder. `only`: nothing else is computed."""
    machine = Machine(entry, start, recorder)
    return machine.run(Builder(machine, only or everything(entry)).program(), most_steps=most_steps)


class Builder(Operands):
    """Makes a step of every instruction."""

    def __init__(self, machine: Machine, needed: Needed) -> None:
        super().__init__(machine, needed)
        self.accessor = Accessor(machine, self)
        self.warp = WarpSteps(machine, self)

    def program(self) -> list[Line]:
        return [self._line(index, instruction) for index, instruction in enumerate(self.entry.instructions)]

    def _line(self, index: int, instruction: Instruction) -> Line:
        name = instruction.parts[0]
        predicate = self._register(instruction.predicate) if instruction.predicate else -1
        kind, step, target, barrier, count = PLAIN, None, -1, 0, 0
        leave, written, join, between = -1, tuple[int, ...](), -1, tuple[int, ...]()
        if name == "bra":
            kind, target = BRANCH, self.entry.labels[instruction.operands[0]]
            if target <= index:
                leave, written = self._waiting_loop(target, index)
            elif instruction.predicate:
                join, between = self._meeting(index, target)
        elif name == "brx":
            kind, target = TABLE, self.source(instruction.operands[0], Kind("u32")).slot
            written = tuple(self.entry.labels[label] for label in instruction.operands[1:])
        elif name in ("ret", "exit", "trap"):
            kind = EXIT
        elif name in ("bar", "barrier"):
            kind, step, barrier, count = self._barrier(instruction)
        elif name == "mbarrier" and instruction.parts[1] in ("try_wait", "test_wait"):
            kind, step = WAIT, self._always(instruction)
        elif self.needed.is_step(index, instruction):
            try:
                step = self.accessor.step(index, instruction) or self._step(instruction)
            except (ValueError, KeyError, IndexError):  # a form that is not known here
                step = self._unknown(instruction)
        return Line(
            kind=kind, step=step, predicate=predicate, is_negated=instruction.is_negated, target=target,
            barrier=barrier, count=count, exit=leave, written=written, join=join, between=between,
        )  # fmt: skip

    def _waiting_loop(self, first: int, last: int) -> tuple[int, tuple[int, ...]]:
        """Where a loop that looks at memory others may change, and changes none, goes on; and what it writes."""
        body = self.entry.instructions[first : last + 1]
        looks = any((one.parts[0] == "ld" and _WATCHING & set(one.parts)) or one.parts[0] == "atom" for one in body)
        changes = any(one.parts[0] in ("st", "red") and "shared" not in one.opcode for one in body)
        exits = {self.entry.labels[one.operands[0]] for one in body if one.parts[0] == "bra" and one.predicate}
        exits = {target for target in exits if not first <= target <= last}
        if body[-1].predicate:
            exits.add(last + 1)
        if not looks or changes or len(exits) != 1:
            return -1, ()
        return exits.pop(), self._written(body)

    def _meeting(self, index: int, target: int) -> tuple[int, tuple[int, ...]]:
        """Where the ways of a forward branch meet, if neither does more than compute; and what they write."""
        body = list(self.entry.instructions[index + 1 : target])
        join = target
        if body and body[-1].parts[0] == "bra" and not body[-1].predicate:  # if … else …
            join = self.entry.labels[body.pop().operands[0]]
            body += self.entry.instructions[target : max(join, target)]
        if join < target or any(one.parts[0] in _MORE_THAN_SUMS for one in body):
            return -1, ()
        return join, self._written(body)

    def _written(self, body: Sequence[Instruction]) -> tuple[int, ...]:
        names = (word for one in body for word in named(one) if word in self.entry.registers)
        return tuple(dict.fromkeys(self._register(name) for name in names))

    def _barrier(self, instruction: Instruction) -> tuple[int, Step | None, int, int]:
        parts, operands = instruction.parts, instruction.operands
        numbers = [int(word) if word.isdigit() else 0 for word in operands]
        if "arrive" in parts and "cluster" not in parts:
            return PLAIN, lambda: self.machine.arrive(numbers[0]), 0, 0
        if "red" in parts:
            return BARRIER, self.warp.counted(instruction), numbers[1], numbers[2] if len(numbers) > 3 else 0
        if "warp" in parts or "cluster" in parts:
            return PLAIN, lambda: None, 0, 0
        return BARRIER, None, numbers[0] if numbers else 0, numbers[1] if len(numbers) > 1 else 0

    def _always(self, instruction: Instruction) -> Step:
        target = self.target(instruction.operands[0])
        return lambda: self.write(target, np.array([True]), None)

    def _unknown(self, instruction: Instruction) -> Step:
        """Results that are not known; its registers are the first operand's, vectors and pairs included."""
        why = np.array([self.machine.reason(f"{instruction.opcode}, which is not emulated")], np.uint8)
        targets = [self.target(word) for word in named(instruction)]

        def step() -> None:
            for target in targets:
                if target.slot >= 0:
                    self.machine.put(target.slot, self.machine.values[target.slot], why)

        return step

    def _step(self, instruction: Instruction) -> Step:
        parts, operands = instruction.parts, instruction.operands
        name = parts[0]
        if name == "call" or (name in _IGNORED and not (operands and operands[0].startswith("{"))):
            return lambda: None
        if name == "mov" and any(operand.startswith("{") for operand in operands):
            return self._pack(instruction)
        special: dict[str, Callable[[Instruction], Step | None]] = {
            **{"setp": self._compare, "set": self._compare, "selp": self._select, "slct": self._select},
            **{"cvta": self._address, "isspacep": self._is_space},
        }
        if made := special.get(name, self.warp.step)(instruction):
            return made
        what = meaning(parts)
        if what and name in ("min", "max") and len(operands) == 4:
            what = three_way(what)
        return self._compute(what, operands) if what else self._unknown(instruction)

    def _compute(self, what: Meaning, operands: tuple[str, ...]) -> Step:
        kinds = [Kind(name) for name in what.reads]
        sources = [self.source(text, kind) for text, kind in zip(operands[1:], kinds, strict=True)]
        target, result = self.target(operands[0].partition("|")[0]), Kind(what.writes)
        pairs = tuple(zip(kinds, sources, strict=True))
        slots = tuple({source.slot for source in sources})
        is_signed, function = result.family == "s", what.function
        read, write, why = self.read, self.write, self.machine.why

        def step() -> None:
            numbers = [kind.numbers(read(source)) for kind, source in pairs]
            write(target, result.bits(function(*numbers)), why(slots), is_signed=is_signed)

        return step

    def _pack(self, instruction: Instruction) -> Step:
        """mov between a register and the pieces of it."""
        whole_kind = Kind(instruction.parts[-1])
        to, given = instruction.operands
        pieces = (to if to.startswith("{") else given).strip("{}").split(",")
        piece = Kind(f"b{8 * whole_kind.bytes // len(pieces)}")
        wide, bits = BITS[whole_kind.bytes], 8 * piece.bytes
        machine = self.machine
        if to.startswith("{"):
            source, targets = self.source(given, whole_kind), [self.target(word) for word in pieces]

            def unpack() -> None:
                whole, why = self.read(source), machine.whys[source.slot]
                for i, target in enumerate(targets):
                    self.write(target, (whole >> wide.type(i * bits)).astype(BITS[piece.bytes]), why)

            return unpack
        sources, target = [self.source(word, piece) for word in pieces], self.target(to)
        slots = tuple(source.slot for source in sources)

        def pack() -> None:
            whole: Array = np.zeros(1, wide)
            for i, source in enumerate(sources):
                whole = whole | (self.read(source).astype(wide) << wide.type(i * bits))
            self.write(target, whole, machine.why(slots))

        return pack

    def _compare(self, instruction: Instruction) -> Step:
        """setp, with its second result and the predicate it is joined with; set, which writes ones or 1.0."""
        parts, operands = instruction.parts, instruction.operands
        kind = Kind(parts[-1])
        join = BOOLEANS[parts[2]] if len(parts) > 3 and parts[2] in BOOLEANS else None
        result = Kind(parts[-2]) if parts[0] == "set" else Kind("pred")
        first, _, second = operands[0].partition("|")
        targets = self.target(first), self.target(second)
        a, b = self.source(operands[1], kind), self.source(operands[2], kind)
        other = self.source(operands[3], Kind("pred")) if join else None
        slots = (a.slot, b.slot, *([other.slot] if other else []))

        def step() -> None:
            is_so = compared(parts[1], kind.numbers(self.read(a)), kind.numbers(self.read(b)))
            why = self.machine.why(slots)
            if kind.pair:
                self.write(targets[0], is_so[:, 0], why)
                self.write(targets[1], is_so[:, 1], why)
                return
            opposite = ~is_so
            if join and other:
                is_so, opposite = join(is_so, self.read(other)), join(opposite, self.read(other))
            if result.family == "pred":
                self.write(targets[0], is_so, why)
                self.write(targets[1], opposite, why)
            else:
                yes = np.float32(1) if result.is_float else np.uint32(0xFFFFFFFF)
                self.write(targets[0], result.bits(np.where(is_so, yes, yes.dtype.type(0))), why)

        return step

    def _select(self, instruction: Instruction) -> Step:
        parts, operands = instruction.parts, instruction.operands
        kind = Kind(parts[-1] if parts[0] == "selp" else parts[-2])
        by = Kind("pred" if parts[0] == "selp" else parts[-1])
        a, b, chooser = self.source(operands[1], kind), self.source(operands[2], kind), self.source(operands[3], by)
        target = self.target(operands[0])
        machine = self.machine

        def step() -> None:
            choice = self.read(chooser)
            first = choice if by.family == "pred" else by.numbers(choice) >= 0
            why = joined(machine.whys[a.slot], machine.whys[b.slot])
            if why is not None:  # only the chosen one counts
                none = np.zeros(1, np.uint8)
                of_a, of_b = machine.whys[a.slot], machine.whys[b.slot]
                why = np.where(first, none if of_a is None else of_a, none if of_b is None else of_b)
            why = joined(why, machine.whys[chooser.slot])
            self.write(target, np.where(first, self.read(a), self.read(b)), why, is_signed=kind.family == "s")

        return step

    # -------------------------------------------------------------------------------------------- addresses

    def _address(self, instruction: Instruction) -> Step:
        """cvta: shared and local memory lie in regions of their own among generic addresses."""
        parts, operands = instruction.parts, instruction.operands
        space = next(word for word in parts[1:] if word != "to").partition("::")[0]
        base = {"shared": SHARED_REGION, "local": LOCAL_REGION}.get(space, 0) << REGION_SHIFT
        kind = Kind(parts[-1])
        target, a = self.target(operands[0]), self.source(operands[1], kind)

        def step() -> None:
            bits = self.read(a)
            moved = bits - np.uint64(base) if "to" in parts else bits + np.uint64(base)
            self.write(target, moved.astype(np.uint64), self.machine.whys[a.slot])

        return step

    def _is_space(self, instruction: Instruction) -> Step:
        wanted = {"shared": SHARED_REGION, "local": LOCAL_REGION}.get(instruction.parts[1].partition("::")[0])
        target, a = self.target(instruction.operands[0]), self.source(instruction.operands[1], Kind("b64"))

        def step() -> None:
            region = self.read(a) >> np.uint64(REGION_SHIFT)
            is_there = region == np.uint64(wanted) if wanted else region < np.uint64(SHARED_REGION)
            self.write(target, is_there, self.machine.whys[a.slot])

        return step
