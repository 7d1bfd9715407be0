"""One launch under watch: every address belongs to the tensor its pointer came from, and every access to a program.

A kernel sees made-up addresses: each tensor argument has a window of 2**44 bytes to itself, so an address tells which
tensor it came from however far it strays, and never meets another tensor by accident.

Programs run one after another, so a race does not happen here; it is found all the same. Each access is an *event*
with a number; a granule keeps its last writer and its first and last reader. Two programs meet on a granule in a race
where one of them writes, not both by atomics, and no atomic orders them: a scalar atomic (a lock, a counter) passes on
all that its program did before (a vector clock).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from sublight.xray.record import Place
from sublight.xray.sanitize.memory import Argument, Array, Memory, Storage, Stored, describe, reach_of, span_of
from sublight.xray.sanitize.notes import Notes

WINDOW_BITS = 44
FIRST = 1 << 62  # no true address is as high
MOST_WAITS = 10_000  # scalar atomics of one program: more are a loop that waits
Kind = Literal["load", "store", "atomic", "atomic load", "atomic store"]
_VERBS: dict[Kind, str] = {
    "load": "reads",
    "store": "writes",
    "atomic": "updates",
    "atomic load": "reads",
    "atomic store": "writes",
}


class Enough(Exception):
    """A launch at pretended sizes has run long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The lanes of one access that belong to one tensor."""

    argument: Argument | None
    storage: Storage
    lanes: Array
    offsets: Array  # in bytes, from the storage's beginning


@dataclass(slots=True)
class Launch:
    kernel: str
    notes: Notes
    memory: Memory
    programs: int
    is_virtual: bool = False  # at pretended sizes: there is no memory behind it
    arguments: list[Argument] = field(default_factory=list)
    program: int = 0
    index: tuple[int, int, int] = (0, 0, 0)
    event: int = 0
    program_of: Array = field(default_factory=lambda: np.zeros(1024, np.int32))
    kinds: list[Kind] = field(default_factory=lambda: ["load"])
    places: list[Place | None] = field(default_factory=lambda: [None])
    clock: Array | None = None  # by program: the last event that happened before now, through atomics
    released: dict[int, Array] = field(default_factory=dict)  # by address: what its last atomic passes on
    waits: int = 0  # scalar atomics of one program in a row

    def pointer(self, name: str, tensor: Any) -> int:
        """The address that the kernel gets to see for a tensor."""
        storage = self.memory.of(tensor)
        virtual: int = FIRST + (len(self.arguments) << WINDOW_BITS) + (1 << (WINDOW_BITS - 1))
        virtual += tensor.data_ptr() % 4096  # kernels may look at the alignment
        self.arguments.append(
            Argument(
                name=name,
                storage=storage,
                start=tensor.data_ptr() - storage.address,
                span=span_of(tensor),
                itemsize=tensor.element_size(),
                text=describe(tensor),
                tensor=tensor,
                virtual=virtual,
                inside=reach_of(tensor),
            )
        )
        storage.forget_marks()
        return virtual

    def begin(self, program: int, index: tuple[int, int, int]) -> None:
        self.program, self.index, self.clock, self.waits = program, index, None, 0

    def access(
        self,
        kind: Kind,
        addresses: Array,
        mask: Array,
        size: int,
        place: Place,
        *,
        values: Array | None = None,
        current: Callable[[Array], Array] | None = None,
        reads: bool = True,
        is_float_add: bool = False,
    ) -> tuple[Array, Array]:
        """Check one access; give back true addresses, and the lanes that may touch memory."""
        shape = addresses.shape
        allowed = np.broadcast_to(mask, shape).reshape(-1).copy()
        true = np.zeros(allowed.shape, np.uint64)
        self._next_event(kind, place)
        if self.is_virtual:
            if self.event > 20_000:
                raise Enough
            return true.reshape(shape), np.zeros(shape, bool)
        flat = addresses.reshape(-1)
        given = None if values is None else np.broadcast_to(values, shape).reshape(-1)
        self._note_store_to(kind, flat, place)
        for group in self._groups(kind, flat, allowed, true, size, place):
            self._check(group, kind, size, place, given, current, reads, is_float_add, true)
        if allowed.size == 1 and kind.startswith("atomic"):
            self._synchronise(int(true[0]), kind)
        return true.reshape(shape), allowed.reshape(shape)

    def _next_event(self, kind: Kind, place: Place) -> None:
        self.event += 1
        if self.event >= len(self.program_of):
            self.program_of = np.concatenate([self.program_of, np.zeros_like(self.program_of)])
        self.program_of[self.event] = self.program
        self.kinds.append(kind)
        self.places.append(place)

    def _note_store_to(self, kind: Kind, flat: Array, place: Place) -> None:
        """Even a store that is masked off everywhere is one that was meant to write this tensor."""
        if kind in ("load", "atomic load") or not flat.size or int(flat[0]) < FIRST:
            return
        which = (int(flat[0]) - FIRST) >> WINDOW_BITS
        if which >= len(self.arguments):
            return
        argument = self.arguments[which]
        storage = argument.storage
        if argument.is_stored_to or storage.claimed is None:
            return
        argument.is_stored_to = True
        storage.fit(argument.tensor)
        storage.part(storage.claimed, argument.tensor)[...] = True
        if storage.stored is None:
            storage.stored = Stored(kernel=self.kernel, place=place, name=argument.name)

    def _groups(
        self, kind: Kind, flat: Array, allowed: Array, true: Array, size: int, place: Place
    ) -> Iterator[_Group]:
        lanes = np.flatnonzero(allowed)
        if not lanes.size:
            return
        which = (flat[lanes].astype(np.uint64) - np.uint64(FIRST)) >> np.uint64(WINDOW_BITS)
        which = np.where(flat[lanes] >= np.uint64(FIRST), which.astype(np.int64), -1)
        for owner in [int(which[0])] if (which == which[0]).all() else np.unique(which).tolist():
            mine = lanes[which == owner]
            if 0 <= owner < len(self.arguments):
                argument = self.arguments[owner]
                offsets = flat[mine].astype(np.int64) - argument.virtual
                good = argument.holds(offsets, size)
                if not good.all():
                    self._out_of_bounds(kind, argument, int(offsets[~good][0]), int((~good).sum()), place)
                    allowed[mine[~good]] = False
                    mine, offsets = mine[good], offsets[good]
                starts = offsets + argument.start
                true[mine] = (starts + argument.storage.address).astype(np.uint64)
                if mine.size:
                    yield _Group(argument=argument, storage=argument.storage, lanes=mine, offsets=starts)
            else:
                yield from self._true_addresses(kind, flat, mine, allowed, true, place)

    def _true_addresses(
        self, kind: Kind, flat: Array, lanes: Array, allowed: Array, true: Array, place: Place
    ) -> Iterator[_Group]:
        """Addresses that the kernel did not get from an argument: data_ptr() kept in a tensor, or a stray."""
        storage = self.memory.at(int(flat[lanes[0]]))
        offsets = flat[lanes].astype(np.int64) - (storage.address if storage else 0)
        if storage is not None and (offsets >= 0).all() and (offsets < storage.byte_count).all():
            true[lanes] = flat[lanes]
            yield _Group(argument=None, storage=storage, lanes=lanes, offsets=offsets)
        elif int(flat[lanes].min()) < 4096 or int(flat[lanes].max()) >= 1 << 47:
            allowed[lanes] = False
            address = int(flat[lanes[0]])
            detail = f"program {self.index} {_VERBS[kind]} address {address:#x}, which belongs to no tensor"
            self.notes.add("out-of-bounds", self.kernel, place, detail)
        else:
            true[lanes] = flat[lanes]  # memory that we do not know: trust it, as Triton does

    def _out_of_bounds(self, kind: Kind, argument: Argument, offset: int, lanes: int, place: Place) -> None:
        element = offset // argument.itemsize
        where = (
            f"{element} of {argument.name}"
            if element < 0 or offset >= argument.span
            else f"{element} of {argument.name}, in a gap between the elements of that view"
        )
        detail = (
            f"program {self.index} {_VERBS[kind]} at offset {where}, a {argument.text} "
            f"that ends at {argument.span // argument.itemsize}; {lanes} lanes do: mask them off"
        )
        self.notes.add("out-of-bounds", self.kernel, place, detail)

    def _check(
        self,
        group: _Group,
        kind: Kind,
        size: int,
        place: Place,
        values: Array | None,
        current: Callable[[Array], Array] | None,
        reads: bool,
        is_float_add: bool,
        true: Array,
    ) -> None:
        storage = group.storage
        if size % storage.granule or (group.offsets % storage.granule).any():
            storage.refine(int(np.gcd.reduce([size, storage.granule, *np.unique(group.offsets % storage.granule)])))
        each = size // storage.granule
        granules = group.offsets // storage.granule
        lanes = group.lanes
        if each > 1:
            granules = (granules[:, None] + np.arange(each)).reshape(-1)
            lanes = np.repeat(lanes, each)
        name = group.argument.name if group.argument else "memory"
        writes = kind in ("store", "atomic", "atomic store")
        if storage.written is not None and reads and kind != "store" and kind != "atomic store":
            self._check_written(storage, granules, each, name, kind, place)
        last_write, first_read, last_read = storage.marks()
        met = self._meets(last_write[granules])
        if met.any():
            self._write_meets(kind, met, last_write[granules], lanes, name, place, values, current, true, is_float_add)
        if writes:
            for readers in (last_read[granules], first_read[granules]):
                met = self._meets(readers)
                if met.any() and not (kind.startswith("atomic") and self._all_atomic(readers[met])):
                    self._race(kind, int(readers[met][0]), name, place)
                    break
            if values is not None and kind == "store":
                self._check_duplicates(granules[::each], values[group.lanes], name, place)
            last_write[granules] = self.event
            if storage.written is not None:
                storage.written[granules] = True
        else:
            fresh = granules[first_read[granules] == 0]
            first_read[fresh] = self.event
            last_read[granules] = self.event

    def _check_written(self, storage: Storage, granules: Array, each: int, name: str, kind: Kind, place: Place) -> None:
        assert storage.written is not None and storage.consumed is not None
        missing = ~storage.written[granules]
        storage.consumed[granules] = True
        if missing.any():
            offset = int(granules[missing][0]) // each
            detail = (
                f"program {self.index} {_VERBS[kind]} {name} at offset {offset}, "
                f"which torch.empty made and nobody wrote ({int(missing.sum()) // each or 1} lanes do)"
            )
            self.notes.add("uninitialised-read", self.kernel, place, detail)

    def _all_atomic(self, events: Array) -> bool:
        return all(self.kinds[event].startswith("atomic") for event in np.unique(events))

    def _meets(self, events: Array) -> Array:
        """Which of these earlier events are another program's, and not ordered before now."""
        other = self.program_of[events]
        met: Array = (events > 0) & (other != self.program)
        if self.clock is not None and met.any():
            met &= events > self.clock[other]
        return met

    def _write_meets(
        self,
        kind: Kind,
        met: Array,
        events: Array,
        lanes: Array,
        name: str,
        place: Place,
        values: Array | None,
        current: Callable[[Array], Array] | None,
        true: Array,
        is_float_add: bool,
    ) -> None:
        """Somebody wrote what this program now reads or writes."""
        if kind.startswith("atomic") and self._all_atomic(events[met]):
            if is_float_add:
                detail = (
                    f"several programs add floats to one address of {name}, in any order: "
                    "sums differ in their last bits from run to run"
                )
                self.notes.add("nondeterministic-atomics", self.kernel, place, detail, is_information=True)
            return
        first = int(events[met][0])
        if kind == "store" and values is not None and current is not None:
            touched = np.unique(lanes[met])
            now, then = values[touched], current(true[touched])
            if now.tobytes() == then.astype(now.dtype).tobytes():
                self._race(kind, first, name, place, is_information=True, more=", the same value: harmless")
                return
        self._race(kind, first, name, place)

    def _race(
        self, kind: Kind, event: int, name: str, place: Place, *, is_information: bool = False, more: str = ""
    ) -> None:
        other, at = int(self.program_of[event]), self.places[event]
        line = at.line if at else 0
        detail = (
            f"program {self.program} {_VERBS[kind]} what program {other} {_VERBS[self.kinds[event]]} "
            f"in {name} (line {line}), in one launch and in no order{more}"
        )
        self.notes.add("race", self.kernel, place, detail, is_information=is_information)
        if at is not None and at != place:
            back = (
                f"program {other} {_VERBS[self.kinds[event]]} what program {self.program} {_VERBS[kind]} "
                f"in {name} (line {place.line}), in one launch and in no order{more}"
            )
            self.notes.add("race", self.kernel, at, back, is_information=is_information)

    def _check_duplicates(self, granules: Array, values: Array, name: str, place: Place) -> None:
        """One store of one program that names an address twice, with different values."""
        if granules.size < 2 or (np.diff(granules) > 0).all():
            return
        order = np.argsort(granules, kind="stable")
        same = np.diff(granules[order]) == 0
        if same.any():
            bits = np.ascontiguousarray(values[order]).view(f"u{values.dtype.itemsize}")
            if (same & (bits[1:] != bits[:-1])).any():
                detail = f"one store of program {self.program} names an address of {name} twice, with different values"
                self.notes.add("race", self.kernel, place, detail)

    def _synchronise(self, address: int, kind: Kind) -> None:
        self.waits += 1
        if self.waits > MOST_WAITS:
            raise NotImplementedError(
                f"program {self.index} waits for a later one, and the interpreter runs one after another"
            )
        if self.clock is None:
            self.clock = np.zeros(self.programs, np.int64)
        if kind != "atomic store" and address in self.released:
            self.clock = np.maximum(self.clock, self.released[address])
        if kind != "atomic load":
            passed_on = self.clock.copy()
            passed_on[self.program] = self.event
            self.released[address] = passed_on
