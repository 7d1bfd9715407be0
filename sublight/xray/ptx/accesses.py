"""Every memory instruction of a kernel: how many sectors or passes it takes against how few it could.

Some blocks of the launch (the first, the last, and those evenly between) are followed through the PTX; each warp's true
addresses are counted as in `transactions`. What could not be followed is said with its reason, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sublight.errors import BadInput
from sublight.xray.occupancy.sm import WARP
from sublight.xray.ptx.entry import Entry, parse_entry
from sublight.xray.ptx.indirect import indirect
from sublight.xray.ptx.leaving import leaving_early
from sublight.xray.ptx.machine import Stop
from sublight.xray.ptx.memory import REGION_SHIFT, GlobalMemory
from sublight.xray.ptx.moved import Moved, Mover
from sublight.xray.ptx.needed import needed
from sublight.xray.ptx.numbers import Array, distinct
from sublight.xray.ptx.patterns import BLOCK_SHIFT, Patterns, Request, RequestShape, from_bases, shape_of
from sublight.xray.ptx.start import start_of
from sublight.xray.ptx.steps import follow
from sublight.xray.ptx.transactions import (
    PASS_BYTES,
    SECTOR_BYTES,
    Wavefronts,
    copy_wavefronts_of,
    matrix_wavefronts_of,
    wavefronts_of,
)
from sublight.xray.record import Access, AccessKind, Code, Finding, Place, Space

_WAYS: dict[AccessKind, tuple[str, ...]] = {
    "load": ("read",),
    "async copy": ("read",),
    "bulk copy": ("read",),
    "matrix load": ("read",),
    "matrix operand": ("read",),
    "store": ("written",),
    "matrix store": ("written",),
    "atomic": ("read", "written"),
}
BLOCKS = 8  # followed: of rows that are not aligned, three happened to begin alike, and sectors were 20 % too few
FREE_LANES = 2048  # an instruction takes as long for none as for so many more
MOST_LANE_STEPS = 100_000 * FREE_LANES
MOST_KEPT = 2**22  # addresses kept for finding what is loaded twice
WORTH_TELLING = 1.25  # times the ideal
WORTH_ALIGNING = 1.1  # one sector more of four is; one more of sixteen, the wide access of an odd row, is not
LEAST_AGAIN_BYTES = 1024  # loaded again by a block before it is worth a line


@dataclass(slots=True)
class Tally:
    """One memory instruction, counted over the warps that ran it."""

    index: int
    space: Space
    kind: AccessKind
    width: int
    requests: int = 0
    sectors: int = 0
    ideal: int = 0
    shifted: int = 0  # sectors above the ideal that a better start would save
    wavefronts: int = 0
    split: int = 0  # wavefronts beside those that the banks need: an asynchronous copy's bytes came from more lines
    unknown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What following a kernel's blocks told: its memory instructions, and where a block had to be left."""

    entry: Entry | None
    tallies: tuple[Tally, ...] = ()
    blocks: int = 0
    stops: tuple[Stop, ...] = ()
    again_bytes: dict[int, int] = field(default_factory=dict)  # load's index -> bytes its block had loaded before
    loaded_bytes: dict[int, int] = field(default_factory=dict)
    touched: dict[str, set[str]] = field(default_factory=dict)  # argument -> read, written
    moved: Moved = field(default_factory=Moved)
    problem: str = ""  # why nothing was followed at all

    def place(self, tally: Tally) -> Place | None:
        return self.entry.instructions[tally.index].place if self.entry else None


class _Counter:
    """The machine's recorder."""

    def __init__(self, mover: Mover, lanes_of_block: int) -> None:
        self.mover = mover
        self.tallies: dict[tuple[int, Space], Tally] = {}
        self.loads: list[tuple[int, Request]] = []
        self.touched: dict[str, set[int]] = {"read": set(), "written": set()}  # regions of memory
        self._lanes_of_block = lanes_of_block
        self._shapes: Patterns[RequestShape] = Patterns()
        self._passes: Patterns[Wavefronts] = Patterns()
        self._kept = 0

    def _tally(self, index: int, space: Space, kind: AccessKind, width: int) -> Tally:
        return self.tallies.setdefault((index, space), Tally(index, space, kind, width))

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
        """`matrices` of ldmatrix and stmatrix; of an asynchronous copy, where its bytes lay and which lanes fetch."""
        tally = self._tally(index, space, kind, width)
        if not active.any():
            return
        if space == "global":
            self._note_global(tally, addresses, active)
            return
        _, places = from_bases(addresses)
        known: tuple[Array, ...] = (places,)
        if copied:
            known = (places, from_bases(copied[0])[1], copied[1])

        def work_out() -> Wavefronts:
            if matrices:
                return matrix_wavefronts_of(addresses, active, matrices)
            if copied:
                return copy_wavefronts_of(addresses, active, width, sources=copied[0], fetching=copied[1])
            return wavefronts_of(addresses, active, width, is_load=kind == "load")

        shared = self._passes.of(index, active, known, work_out)
        tally.requests += shared.requests
        tally.wavefronts += shared.wavefronts
        tally.split += shared.split
        tally.ideal += shared.ideal

    def _note_global(self, tally: Tally, addresses: Array, active: Array) -> None:
        bases, places = from_bases(addresses)
        shape = self._shapes.of(tally.index, active, (places,), lambda: shape_of(places, active, tally.width))
        request = Request(shape=shape, bases=bases)
        counted = request.shape.counted
        tally.sectors += counted.sectors
        tally.shifted += counted.shifted
        tally.requests += counted.requests
        tally.ideal += counted.ideal
        self.mover.note(tally.index, tally.kind, request, addresses, active)
        first, last = request.regions
        regions = [first] if first == last else distinct(addresses[active] >> REGION_SHIFT).tolist()
        for way in _WAYS[tally.kind]:
            self.touched[way].update(regions)
        if tally.kind in ("load", "async copy") and self._kept < MOST_KEPT:
            self.loads.append((tally.index, request))
            self._kept += request.shape.lanes

    def note_operands(self, index: int, warps: int, passes: int) -> None:
        """Tiles that tensor cores read themselves: so many warps ask, together."""
        tally = self._tally(index, "shared", "matrix operand", passes * PASS_BYTES // (warps * WARP) if warps else 0)
        tally.requests += warps
        tally.wavefronts += passes
        tally.ideal += passes

    def note_unknown(self, index: int, space: Space, kind: AccessKind, width: int, reason: str) -> None:
        self._tally(index, space, kind, width).unknown = reason

    def again(self) -> tuple[dict[int, int], dict[int, int]]:
        """Bytes that each load fetched, and how many of them its block had fetched before, other warps included."""
        fetched: dict[int, int] = {}
        repeated: dict[int, int] = {}
        apart: dict[int, list[tuple[int, Request]]] = {}  # tensors are: no byte of one is another's
        is_mixed = any(first != last for first, last in (request.regions for _, request in self.loads))
        for index, request in self.loads:
            apart.setdefault(0 if is_mixed else request.regions[0], []).append((index, request))
            requested_bytes = len(request.shape.starts) * request.shape.width
            fetched[index] = fetched.get(index, 0) + requested_bytes
        for loads in apart.values():
            for index, count in _repeated(loads, self._lanes_of_block).items():
                repeated[index] = repeated.get(index, 0) + count
        return repeated, fetched


def _repeated(loads: Sequence[tuple[int, Request]], lanes_of_block: int) -> dict[int, int]:
    """Load's index -> bytes that an earlier one had fetched for the same block."""
    grain = min(request.shape.width for _, request in loads)
    keys, owners = [], []
    for index, request in loads:
        blocks = request.shape.warps.astype(np.int64) * WARP // lanes_of_block
        pieces = np.arange(request.shape.width // grain)
        first = request.starts // grain + (blocks << BLOCK_SHIFT)
        keys.append((first[:, None] + pieces).reshape(-1))
        owners.append(np.full(keys[-1].size, index))
    every, owner = np.concatenate(keys), np.concatenate(owners)
    order = np.argsort(every, kind="stable")  # the first to ask comes first
    in_order = every[order]
    is_again = np.zeros(len(every), np.bool_)
    is_again[order[1:]] = in_order[1:] == in_order[:-1]
    found, counts = np.unique(owner[is_again], return_counts=True)
    return {int(index): int(count) * grain for index, count in zip(found, counts, strict=True)}


def most_steps_of(lanes_of_block: int, blocks: int) -> int:
    """What a page may take of instructions that are computed: about a second and a half of them, by their lanes.

    >>> most_steps_of(128, 1), most_steps_of(128, 8), most_steps_of(1024, 8), most_steps_of(1024, 1000)
    (94117, 66666, 20000, 20000)
    """
    lanes = lanes_of_block * min(blocks, BLOCKS)  # who asks for more blocks than a page has wants them to their end
    return MOST_LANE_STEPS // (FREE_LANES + lanes)


def follow_blocks(code: Code, *, blocks: int = BLOCKS, most_steps: int | None = None) -> Followed:
    """Follow that many blocks of the launch, all together; no further than so many instructions that are computed."""
    if not code.ptx:
        return Followed(entry=None, problem="only the binary is at hand: addresses are followed through PTX")
    try:
        entry = leaving_early(parse_entry(code.ptx, code.symbol))
    except BadInput as error:
        return Followed(entry=None, problem=str(error))
    start = start_of(code, entry, blocks=blocks)
    if isinstance(start, str):
        return Followed(entry=entry, problem=start)
    x, y, z = start.threads
    lanes_of_block = -(-x * y * z // WARP) * WARP
    most_steps = most_steps or most_steps_of(lanes_of_block, len(start.blocks))
    counter = _Counter(Mover(lanes_of_block, indirect(entry)), lanes_of_block)
    stops = follow(entry, start, counter, most_steps=most_steps, only=needed(entry))
    again, fetched = counter.again()
    return Followed(
        entry=entry,
        tallies=tuple(counter.tallies[key] for key in sorted(counter.tallies)),
        blocks=len(start.blocks),
        stops=stops,
        again_bytes=again,
        loaded_bytes=fetched,
        touched=_by_argument(counter.touched, start.memory),
        moved=counter.mover.moved(start.memory),
    )


def _by_argument(touched: dict[str, set[int]], memory: GlobalMemory) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for way, regions in touched.items():
        for index in regions:
            if region := memory.region_of(index):
                found.setdefault(region.name, set()).add(way)
    return found


def accesses(code: Code, *, blocks: int = BLOCKS, followed: Followed | None = None) -> tuple[Access, ...]:
    """One entry for each memory instruction that a followed block reached, in the order of the code."""
    followed = followed or follow_blocks(code, blocks=blocks)
    return tuple(_access(tally, followed) for tally in followed.tallies)


def _access(tally: Tally, followed: Followed) -> Access:
    assert followed.entry
    instruction = followed.entry.instructions[tally.index]
    is_known, is_global = not tally.unknown, tally.space == "global"
    return Access(
        place=instruction.place,
        space=tally.space,
        kind=tally.kind,
        bytes_per_thread=tally.width,
        requests=tally.requests if is_known else 0,
        sectors=tally.sectors if is_known and is_global else 0,
        ideal_sectors=tally.ideal if is_known and is_global else 0,
        wavefronts=tally.wavefronts if is_known and not is_global else 0,
        ideal_wavefronts=tally.ideal if is_known and not is_global else 0,
        split_wavefronts=tally.split if is_known else 0,
        unknown=tally.unknown,
        instruction=instruction.opcode,
    )


def access_findings(code: Code, followed: Followed) -> tuple[Finding, ...]:
    """What takes more sectors or passes than it must, line by line, the worst first."""
    weighed = [*_by_line(code, followed, "global"), *_by_line(code, followed, "shared"), *_again(code, followed)]
    return tuple(finding for _, finding in sorted(weighed, key=lambda pair: -pair[0]))


def _groups(followed: Followed, tallies: Iterable[Tally]) -> dict[tuple[Place | None, str], list[Tally]]:
    groups: dict[tuple[Place | None, str], list[Tally]] = {}
    for tally in tallies:
        groups.setdefault((followed.place(tally), tally.kind), []).append(tally)
    return groups


def _by_line(code: Code, followed: Followed, space: Space) -> Iterable[tuple[float, Finding]]:
    known = (tally for tally in followed.tallies if tally.space == space and not tally.unknown)
    for (place, kind), group in _groups(followed, known).items():
        ideal = sum(tally.ideal for tally in group)
        actual = sum(tally.sectors if space == "global" else tally.wavefronts for tally in group)
        requests = sum(tally.requests for tally in group)
        if not ideal or actual <= ideal:
            continue
        ratio = actual / ideal
        if space == "shared":
            if ratio >= WORTH_TELLING:
                detail = (
                    f"{kind}: {ratio:.3g}-way bank conflict, {actual / requests:.3g} passes a warp where "
                    f"{ideal / requests:.3g} would do: pad or swizzle the rows in shared memory"
                )
                yield ratio, _finding("bank-conflict", code, place, detail)
            continue
        shifted = sum(tally.shifted for tally in group)
        bytes_moved = (
            f"{actual / requests:.3g} sectors a request where {ideal / requests:.3g} would do "
            f"({actual * SECTOR_BYTES:,} bytes of sectors touched for {ideal * SECTOR_BYTES:,} wanted)"
        )
        if shifted == actual - ideal:
            if ratio < WORTH_ALIGNING:
                continue
            detail = f"{kind}: {bytes_moved}: the warps' pieces do not begin at a multiple of 32 bytes"
            yield ratio, _finding("misaligned", code, place, detail)
        elif ratio >= WORTH_TELLING:
            detail = f"{kind}: {bytes_moved}: let neighbouring lanes take neighbouring addresses"
            yield ratio, _finding("uncoalesced", code, place, detail)


def _again(code: Code, followed: Followed) -> Iterable[tuple[float, Finding]]:
    loads = [tally for tally in followed.tallies if tally.index in followed.loaded_bytes and tally.space == "global"]
    for (place, _), group in _groups(followed, loads).items():
        again = sum(followed.again_bytes.get(tally.index, 0) for tally in group)
        total = sum(followed.loaded_bytes[tally.index] for tally in group)
        if again >= LEAST_AGAIN_BYTES * followed.blocks and again * WORTH_TELLING >= total * (WORTH_TELLING - 1):
            detail = (
                f"{again:,} of {total:,} bytes loaded here are bytes that the same block has loaded before "
                "(another warp, an earlier line or iteration): a cache may serve them, a register would"
            )
            yield again / total, _finding("redundant-load", code, place, detail, is_information=True)


def _finding(name: str, code: Code, place: Place | None, detail: str, *, is_information: bool = False) -> Finding:
    return Finding(id=name, kernel=code.name, place=place, detail=detail, is_information=is_information)
