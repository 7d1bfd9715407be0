"""A snapshot's events replayed into a ledger.

The recording may begin in the middle: what was live before it is what the final state holds and no event made, and what
an event frees that none made. Live means not yet free for reuse, so what waits for another stream still counts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sublight.errors import BadInput
from sublight.trace.memory.ledger import Floats, Ledger
from sublight.trace.memory.snapshot import Block, Event, Segment, Snapshot, Stack
from sublight.trace.memory.stacks import Phase, Site, site
from sublight.trace.record import Ints

SMALL_SEGMENT_BYTES = 2 << 20  # what the allocator takes for small tensors; larger segments are for large ones
SMALL_PAGE_BYTES, LARGE_PAGE_BYTES = 2 << 20, 20 << 20  # by which expandable segments grow and shrink


class _Life(NamedTuple):
    """The time during which an address was allocated."""

    address: int
    bytes: int
    first: int
    last: int
    stack: Stack
    recorded: bool  # an event made it: a stack that is empty was empty then


def ledgers(snapshot: Snapshot) -> dict[int, Ledger]:
    """The ledger of each device on which something was allocated."""
    devices = {segment.device for segment in snapshot.segments}
    devices |= {device for device, events in enumerate(snapshot.events) if events}
    if not devices:
        raise BadInput(
            f"{snapshot.source} holds no memory: torch.cuda.memory._record_memory_history() must come before the work"
        )
    return {device: _ledger(snapshot, device) for device in sorted(devices)}


def _ledger(snapshot: Snapshot, device: int) -> Ledger:
    events = snapshot.events[device] if device < len(snapshot.events) else ()
    segments = [segment for segment in snapshot.segments if segment.device == device]
    free = "free_completed" if any(event.action == "free_completed" for event in events) else "free_requested"
    blocks = [block for segment in segments for block in segment.blocks if block.active]
    lives, odd = _lives(events, "alloc", free, blocks, complete=bool(segments))
    areas, _ = _lives(events, "segment_alloc", "segment_free", segments, complete=bool(segments))
    notes = [*snapshot.lost, *_notes(events, lives, odd)]
    times = _times(events, snapshot.timed, notes)
    sites, codes = _sites(lives)
    ledger = Ledger(
        source=snapshot.source,
        device=f"GPU {device}",
        times_s=times,
        reserved_bytes=_reserved(events, segments),
        first=_column(life.first for life in lives),
        last=_column(life.last for life in lives),
        bytes=_column(life.bytes for life in lives),
        site=codes,
        sites=sites,
        expandable=any(s.expandable for s in segments) or any(event.action == "segment_map" for event in events),
        oom=tuple(
            (float(times[moment]), event.bytes) for moment, event in enumerate(events, 1) if event.action == "oom"
        ),
        notes=tuple(notes),
    )
    return _with_holes(ledger, lives, areas)


def _lives(
    events: Sequence[Event], begin: str, end: str, final: Iterable[Block | Segment], *, complete: bool
) -> tuple[list[_Life], int]:
    """The spans between `begin` and `end` events at each address, completed from the final state; and contradictions.

    >>> held = [Block(0x10, 5, True, ()), Block(0x20, 7, True, ())]
    >>> events = [Event("alloc", 0x20, 7, 0, ()), Event("free", 0x30, 9, 1, ())]
    >>> [(life.address, life.first, life.last) for life in _lives(events, "alloc", "free", held, complete=True)[0]]
    [(48, 0, 2), (16, 0, 3), (32, 1, 3)]
    """
    never, odd = len(events) + 1, 0
    open_at: dict[int, tuple[int, Event]] = {}
    lives = []
    for moment, event in enumerate(events, 1):
        if event.action == begin:
            if event.address in open_at:  # its free is missing
                odd += 1
                first, old = open_at.pop(event.address)
                lives.append(_Life(old.address, old.bytes, first, moment, old.stack, True))
            open_at[event.address] = (moment, event)
        elif event.action == end:
            if (found := open_at.pop(event.address, None)) is not None:
                first, old = found
                lives.append(_Life(old.address, old.bytes, first, moment, old.stack, True))
            else:
                lives.append(_Life(event.address, event.bytes, 0, moment, (), False))
    held = {block.address: block for block in final}
    for address, block in held.items():
        if address not in open_at:
            stack = block.stack if isinstance(block, Block) else ()
            lives.append(_Life(address, block.bytes, 0, never, stack, False))
    for address, (first, event) in open_at.items():
        block_there = held.get(address)
        odd += complete and block_there is None
        stack = event.stack or (block_there.stack if isinstance(block_there, Block) else ())
        lives.append(_Life(address, event.bytes, first, never, stack, True))
    return lives, odd


def _sites(lives: Sequence[_Life]) -> tuple[tuple[Site, ...], Ints]:
    """Autograd's own thread has no Python stack: where stacks were recorded, an allocation without one is its."""
    empty: Phase = "backward" if any(life.stack for life in lives if life.recorded) else "other"
    known: dict[tuple[Stack, bool], Site] = {}
    codes: dict[Site, int] = {}
    column = []
    for life in lives:
        key = (life.stack, life.recorded)
        if key not in known:
            known[key] = site(life.stack, empty=empty if life.recorded else "before")
        column.append(codes.setdefault(known[key], len(codes)))
    return tuple(codes), np.array(column, dtype=np.int64)


def _times(events: Sequence[Event], timed: bool, notes: list[str]) -> Floats:
    if not timed:
        notes.append("the snapshot holds no times: events are drawn one millisecond apart")
        return np.arange(len(events) + 1) / 1e3
    stamps = _column(event.time_us for event in events)
    ordered = np.maximum.accumulate(stamps) if len(stamps) else stamps
    if (ordered != stamps).any():
        notes.append("the snapshot's clock goes back in places: those events are drawn at the time before them")
    times = (ordered - ordered[0]) / 1e6 if len(stamps) else np.empty(0)
    return np.concatenate(([0.0], times))


def _reserved(events: Sequence[Event], segments: Sequence[Segment]) -> Ints | None:
    """Backwards from the end, where it is known; without segments, forward from the least it can have been."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    change = _column(signs.get(event.action, 0) * event.bytes for event in events)
    after: Ints = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(change)))
    if segments:
        after = after + (sum(segment.bytes for segment in segments) - int(after[-1]))
        return np.maximum(after, 0)
    return after - min(0, int(after.min())) if change.any() else None


def _with_holes(ledger: Ledger, lives: Sequence[_Life], areas: Sequence[_Life]) -> Ledger:
    """What the segments of the peak's moment held beside the live blocks; not of expandable ones, which can shrink."""
    moment = ledger.peak
    here = sorted((area.address, area.bytes) for area in areas if area.first <= moment < area.last)
    if ledger.expandable or not here:
        return ledger
    starts = np.array([address for address, _ in here])
    live = sorted((life.address, life.bytes) for life in lives if life.first <= moment < life.last)
    inside: dict[int, list[tuple[int, int]]] = {}
    for address, size in live:
        inside.setdefault(int(np.searchsorted(starts, address, side="right")) - 1, []).append((address, size))
    stuck = pages = cached = 0
    for index, (address, size) in enumerate(here):
        used = inside.get(index)
        if not used:
            cached += size
            continue
        page = SMALL_PAGE_BYTES if size <= SMALL_SEGMENT_BYTES else LARGE_PAGE_BYTES
        for hole in holes(address, size, used):
            stuck += hole
            pages += max(0, hole // page - 1) * page  # a hole need not begin at a page
    return dataclasses.replace(ledger, stuck_bytes=stuck, stuck_page_bytes=pages, cached_bytes=cached)


def holes(address: int, size: int, used: Iterable[tuple[int, int]]) -> list[int]:
    """Sizes of the stretches of a segment that no block takes.

    >>> holes(100, 50, [(100, 10), (120, 20)])
    [10, 10]
    """
    edges = [(address, 0), *used, (address + size, 0)]
    gaps = (after - (before + taken) for (before, taken), (after, _) in itertools.pairwise(edges))
    return [gap for gap in gaps if gap > 0]


def _notes(events: Sequence[Event], lives: Sequence[_Life], odd: int) -> list[str]:
    notes = []
    if not events:
        notes.append(
            "no history was recorded, so this is the moment of the snapshot, not the peak: "
            "call torch.cuda.memory._record_memory_history() before the work"
        )
    elif any(life.first == 0 and not life.stack for life in lives):
        notes.append(
            "the recording began after some memory was taken: call "
            "torch.cuda.memory._record_memory_history() first of all to see where all of it comes from"
        )
    if events and not any(life.stack for life in lives):
        notes.append('no stacks were recorded: _record_memory_history(stacks="python") tells which line made what')
    if odd:
        notes.append(f"{odd:,} allocations contradict the final state: the history may have been cut in parts")
    return notes


def _column(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)
