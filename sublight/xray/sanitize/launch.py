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
from sublight.xray.sanitize.access import VERBS, Access, Group, lanes_text, words_of_outside
from sublight.xray.sanitize.at import Enough
from sublight.xray.sanitize.barriers import Barriers
from sublight.xray.sanitize.memory import Argument, Array, Memory, Stored, describe, reach_of, span_of
from sublight.xray.sanitize.notes import Notes
from sublight.xray.sanitize.order import Kind, Order

WINDOW_BITS = 44
FIRST = 1 << 62  # no true address is as high


@dataclass(slots=True)
class Launch:
    kernel: str
    notes: Notes
    memory: Memory
    shape: tuple[int, int, int]  # the grid
    is_virtual: bool = False  # at pretended sizes: there is no memory behind it
    arguments: list[Argument] = field(default_factory=list)
    program: int = 0
    index: tuple[int, int, int] = (0, 0, 0)
    event: int = 0
    program_of: Array = field(default_factory=lambda: np.zeros(1024, np.int32))
    kinds: list[Kind] = field(default_factory=lambda: ["load"])
    places: list[Place | None] = field(default_factory=lambda: [None])
    stored_lanes: dict[int, dict[int, int]] = field(default_factory=dict)  # a storage's address -> program -> lanes
    has_atomics: bool = False  # that write
    has_many_warps: bool = True  # one warp's lanes see each other's stores
    unread: list[tuple[Place, str]] = field(default_factory=list)  # stores to what other lanes may have to read yet
    order: Order = field(init=False)
    barriers: Barriers = field(init=False)

    def __post_init__(self) -> None:
        self.order, self.barriers = Order(self.shape), Barriers()

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
        self.program, self.index = program, index
        self.order.begin(program, index)
        self.barriers.reached(self.event)

    def end(self) -> None:
        """Every program has run: a tensor that some programs never came to store to may have gaps on purpose."""
        for argument in self.arguments:
            if 0 < argument.storing_programs <= self.program:
                argument.storage.is_passed_by = True
        for place, detail in self.unread:  # where programs race, too, another tensor mends both
            if ("race", self.kernel, place) not in self.notes.by_place:
                self.notes.add("missing-barrier", self.kernel, place, detail)

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
        acquires: bool = True,
        releases: bool = True,
        sources: frozenset[Place] = frozenset(),
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
        access = Access(
            kind=kind,
            size=size,
            place=place,
            values=None if values is None else np.broadcast_to(values, shape).reshape(-1),
            current=current,
            reads=reads,
            is_float_add=is_float_add,
            sources=sources,
            true=true,
        )
        self._note_store_to(kind, flat, place)
        for group in self._groups(access, flat, allowed):
            self._check(access, group)
        if allowed.size == 1 and access.is_atomic:
            self.order.pass_on(int(true[0]), self.event, self.barriers, acquires=acquires, releases=releases)
            self.barriers.reached(self.event)
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
        if argument.last_program != self.program:
            argument.last_program, argument.storing_programs = self.program, argument.storing_programs + 1
            argument.stored_at = argument.stored_at or place
        if argument.is_stored_to or storage.claimed is None:
            return
        argument.is_stored_to = True
        storage.fit(argument.tensor)
        storage.part(storage.claimed, argument.tensor)[...] = True
        if storage.stored is None:
            storage.stored = Stored(
                kernel=self.kernel,
                place=place,
                name=argument.name,
                text=argument.text,
                shape=tuple(argument.tensor.shape),
                strides=argument.tensor.stride(),
                start=argument.start,
                itemsize=argument.itemsize,
            )

    def _groups(self, access: Access, flat: Array, allowed: Array) -> Iterator[Group]:
        lanes = np.flatnonzero(allowed)
        if not lanes.size:
            return
        used = flat if lanes.size == flat.size else flat[lanes]
        # one tensor's window alone, as nearly always: its bounds tell, lane by lane is slow
        low, high = ((int(end) - FIRST) >> WINDOW_BITS for end in (used.min(), used.max()))
        if low == high:
            yield from self._group(access, low, used, lanes, allowed)
            return
        which = (used.astype(np.int64) - np.int64(FIRST)) >> WINDOW_BITS
        for owner in np.unique(which).tolist():
            mine = which == owner
            yield from self._group(access, owner, used[mine], lanes[mine], allowed)

    def _group(self, access: Access, owner: int, used: Array, lanes: Array, allowed: Array) -> Iterator[Group]:
        if not 0 <= owner < len(self.arguments):
            yield from self._true_addresses(access, used, lanes, allowed)
            return
        argument = self.arguments[owner]
        offsets = used.astype(np.int64) - argument.virtual
        good = argument.holds(offsets, access.size)
        if not good.all():
            where = words_of_outside(argument, int(offsets[~good][0]), int((~good).sum()))
            detail = f"program {self.index} {VERBS[access.kind]} {where}"
            self.notes.add("out-of-bounds", self.kernel, access.place, detail)
            allowed[lanes[~good]] = False
            lanes, offsets = lanes[good], offsets[good]
        starts = offsets + argument.start
        access.true[lanes] = (starts + argument.storage.address).astype(np.uint64)
        if lanes.size:
            yield Group(argument=argument, storage=argument.storage, lanes=lanes, offsets=starts)

    def _true_addresses(self, access: Access, used: Array, lanes: Array, allowed: Array) -> Iterator[Group]:
        """Addresses that the kernel did not get from an argument: data_ptr() kept in a tensor, or a stray."""
        storage = self.memory.at(int(used[0]))
        offsets = used.astype(np.int64) - (storage.address if storage else 0)
        if storage is not None and (offsets >= 0).all() and (offsets < storage.byte_count).all():
            access.true[lanes] = used
            yield Group(argument=None, storage=storage, lanes=lanes, offsets=offsets)
        elif int(used.min()) < 4096 or int(used.max()) >= 1 << 47:
            allowed[lanes] = False
            detail = (
                f"program {self.index} {VERBS[access.kind]} address {int(used[0]):#x}, which belongs to no tensor: "
                "pass the tensor itself, or mend the offset"
            )
            self.notes.add("out-of-bounds", self.kernel, access.place, detail)
        else:
            access.true[lanes] = used  # memory that we do not know: trust it, as Triton does

    def _check(self, access: Access, group: Group) -> None:
        storage, size = group.storage, access.size
        if size % storage.granule or (storage.granule > 1 and (group.offsets % storage.granule).any()):
            storage.refine(int(np.gcd.reduce([size, storage.granule, *np.unique(group.offsets % storage.granule)])))
        each = size // storage.granule
        granules = group.offsets // storage.granule
        if each > 1:
            granules = (granules[:, None] + np.arange(each)).reshape(-1)
        if storage.written is not None and access.reads and access.kind not in ("store", "atomic store"):
            self._check_written(access, group, granules, each)
        last_write, first_read, last_read = storage.marks()
        writers = last_write[granules]
        met = self._meets(writers)
        if met.any():
            self._write_meets(access, group, met, writers, each)
        if access.kind in ("store", "atomic", "atomic store"):
            self._count(access, storage.address, group.lanes.size)
            for readers in (last_read[granules], first_read[granules]):
                met = self._meets(readers)
                if met.any() and not (access.is_atomic and self._all_atomic(readers[met])):
                    self._race(access, group, met, readers, each)
                    break
            if access.kind == "store" and not self._check_duplicates(access, group, granules[::each], last_read):
                self._check_barrier(access, group, granules, last_read[granules], each)
            # a plain store of this program stays known behind its own atomic: another program's atomic meets it
            mine = np.unique(writers[self.program_of[writers] == self.program]) if access.kind == "atomic" else ()
            plain = [event for event in mine if self.kinds[event] == "store"]
            last_write[granules[~np.isin(writers, plain)] if plain else granules] = self.event
            if self.has_many_warps and access.kind == "store":
                self.barriers.stored(storage, granules, group.lanes, each, self.event, access.true.size)
            if storage.written is not None:
                storage.written[granules] = True
        else:
            if access.kind == "load":
                self._check_barrier(access, group, granules, writers, each)
                self.barriers.loaded(storage, granules, group.lanes, each, self.event, access.true.size)
            fresh = granules[first_read[granules] == 0]
            first_read[fresh] = self.event
            last_read[granules] = self.event

    def _count(self, access: Access, address: int, lanes: int) -> None:
        self.has_atomics = self.has_atomics or access.kind == "atomic"
        programs = self.stored_lanes.setdefault(address, {})
        programs[self.program] = programs.get(self.program, 0) + lanes

    def _check_written(self, access: Access, group: Group, granules: Array, each: int) -> None:
        storage = group.storage
        assert storage.written is not None and storage.consumed is not None
        missing = ~storage.written[granules]
        storage.consumed[granules] = True
        if missing.any():
            lanes = np.unique(np.flatnonzero(missing) // each)
            detail = (
                f"program {self.index} {VERBS[access.kind]} {group.spot(int(lanes[0]))}, which torch.empty made and "
                f"nobody wrote{lanes_text(len(lanes))}: write it first, or begin with torch.zeros"
            )
            self.notes.add("uninitialised-read", self.kernel, access.place, detail)

    def _check_barrier(self, access: Access, group: Group, granules: Array, events: Array, each: int) -> None:
        """Stores of this very program before a load, or loads before a store, by other lanes with no barrier since."""
        if not self.has_many_warps:
            return
        met, did = (self.barriers.unread, "read") if access.kind == "store" else (self.barriers.unseen, "wrote")
        others = met(group.storage, granules, events, group.lanes, each, access.true.size)
        if others.any() and access.values is not None and access.current is not None:  # does the store change anything?
            touched = group.lanes[np.flatnonzero(others) // each]
            others[others] = access.values[touched] != access.current(access.true[touched])
        if others.any():
            first = int(np.flatnonzero(others)[0])
            at = self.places[int(events[first])]
            detail = (
                f"program {self.index} {VERBS[access.kind]} {group.spot(first // each)}, which other lanes of it {did} "
                f"at line {at.line if at else 0}: they may not have done so yet; put tl.debug_barrier() between"
            )
            if access.kind == "load":
                self.notes.add("missing-barrier", self.kernel, access.place, detail)
            else:
                self.unread.append((access.place, detail))

    def _all_atomic(self, events: Array) -> bool:
        return all(self.kinds[event].startswith("atomic") for event in np.unique(events))

    def _meets(self, events: Array) -> Array:
        """Which of these earlier events are another program's, and not ordered before now."""
        met: Array = events > 0
        if not met.any():
            return met
        other = self.program_of[events]
        met &= other != self.program
        is_open = met & self.order.is_open(events, other)
        if self.order.too_early:
            for event in np.unique(events[met & ~is_open]):
                self._note_too_early(int(event))
        return is_open

    def _note_too_early(self, event: int) -> None:
        atomic, store = self.places[self.order.too_early.get(event, 0)], self.places[event]
        if atomic and store:
            detail = (
                f"this tells other programs that line {store.line} is done, but other lanes may not have stored yet: "
                "put tl.debug_barrier() before it"
            )
            self.notes.add("missing-barrier", self.kernel, atomic, detail)

    def _write_meets(self, access: Access, group: Group, met: Array, events: Array, each: int) -> None:
        """Somebody wrote what this program now reads or writes."""
        if access.is_atomic and self._all_atomic(events[met]):
            if access.is_float_add:
                spot = group.spot(int(np.flatnonzero(met)[0]) // each)
                detail = (
                    f"several programs add floats to {spot}, in any order: sums differ in their last bits "
                    "from run to run; where that matters, store partial sums and add them in a second launch"
                )
                self.notes.add("nondeterministic-atomics", self.kernel, access.place, detail, is_information=True)
            return
        same: Literal["", "flag", "values"] = ""
        if access.kind == "store" and access.values is not None and access.current is not None:
            touched = group.lanes[np.unique(np.flatnonzero(met) // each)]
            now, then = access.values[touched], access.current(access.true[touched])
            if now.tobytes() == then.astype(now.dtype).tobytes():
                # one value for all lanes is a flag that anybody may raise; computed values are tiles that overlap
                same = "flag" if (access.values == access.values[0]).all() else "values"
        self._race(access, group, met, events, each, same=same)

    def _race(
        self,
        access: Access,
        group: Group,
        met: Array,
        events: Array,
        each: int,
        *,
        same: Literal["", "flag", "values"] = "",
    ) -> None:
        first = int(np.flatnonzero(met)[0])
        event, spot = int(events[first]), group.spot(first // each)
        at, mine, theirs = self.places[event], access.kind, self.kinds[event]
        here: tuple[int, ...] = self.index
        other = tuple(map(int, np.unravel_index(int(self.program_of[event]), self.shape)))
        if same == "flag":
            advice = "it is the same value, so harmless"
        elif same == "values":
            advice = "the values are the same this time, so their tiles overlap; give each program its own elements"
        elif "load" in (mine, theirs) or "atomic load" in (mine, theirs):
            advice = "nothing orders them in one launch; add with tl.atomic_add, or write to another tensor"
        else:
            advice = "nothing orders them in one launch; give each program its own elements, or use tl.atomic_add"
        sides = [(here, mine, other, theirs, access.place, at.line if at else 0)]
        if at is not None and at != access.place:
            sides.append((other, theirs, here, mine, at, access.place.line))
        for one, does, another, did, place, line in sides:
            detail = f"program {one} {VERBS[does]} {spot}, which program {another} {VERBS[did]} (line {line}): {advice}"
            self.notes.add("race", self.kernel, place, detail, is_information=same == "flag")

    def _check_duplicates(self, access: Access, group: Group, elements: Array, last_read: Array) -> bool:
        """One store of one program that names an address twice, with different values, or each made of the old one."""
        if elements.size < 2 or (elements[1:] > elements[:-1]).all():
            return False
        assert access.values is not None
        order = np.argsort(elements, kind="stable")
        same = np.diff(elements[order]) == 0
        if not same.any():
            return False
        values = access.values[group.lanes]
        bits = np.ascontiguousarray(values[order]).view(f"u{values.dtype.itemsize}")
        twice, how = same & (bits[1:] != bits[:-1]), "with different values: make the addresses differ,"
        if not twice.any():
            reads = last_read[elements[order][1:]]
            old = [read for read in np.unique(reads[same]) if self.places[read] in access.sources]
            twice = same & np.isin(reads, old) & (self.program_of[reads] == self.program)
            how = "each having added to what was there, so that one gets lost: make the addresses differ,"
        if twice.any():
            detail = (
                f"one store of program {self.index} writes {group.spot(int(order[np.flatnonzero(twice)[0]]))} "
                f"from two lanes, {how} or use tl.atomic_add"
            )
            self.notes.add("race", self.kernel, access.place, detail)
        return bool(twice.any())
