"""What the followed blocks moved, tensor by tensor: each sector that a block reads, once; each write as it is made.

A block's second read of a sector may come from the L1, and its writes go through: so this is what the L2 has to serve
at least, where no other block on the SM has read the same.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np

from sublight.xray.occupancy.sm import WARP
from sublight.xray.ptx.memory import REGION_SHIFT, GlobalMemory
from sublight.xray.ptx.numbers import Array, distinct
from sublight.xray.ptx.patterns import BLOCK_SHIFT, Request
from sublight.xray.ptx.transactions import SECTOR_BYTES, sectors_of
from sublight.xray.record import AccessKind

ELSEWHERE = ""  # memory of no argument: behind addresses that are themselves data
_BY_LANE = ("load", "async copy")
_WRITES = ("store", "matrix store", "atomic")
_SECTOR_BITS = SECTOR_BYTES.bit_length() - 1
MOST_KEPT = 2**22  # sectors' numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes by argument, of the followed blocks together; `ELSEWHERE` is what belongs to none."""

    read_bytes: dict[str, int] = field(default_factory=dict)
    indirect_bytes: dict[str, int] = field(default_factory=dict)  # of those, where data say what is read
    written_bytes: dict[str, int] = field(default_factory=dict)


class Mover:
    """Counts as the blocks are followed."""

    def __init__(self, lanes_of_block: int, indirect: Container[int] = ()) -> None:
        self._lanes_of_block = lanes_of_block
        self._is_indirect = indirect  # instructions
        self._kept: tuple[list[Request], list[Request]] = ([], [])  # directly, indirectly
        self._count = 0
        self._read: dict[int, int] = {}  # region -> sectors that are counted as they are asked for
        self._written: dict[int, int] = {}

    def note(self, index: int, kind: AccessKind, request: Request, addresses: Array, active: Array) -> None:
        if kind in _BY_LANE and self._count < MOST_KEPT:
            self._kept[index in self._is_indirect].append(request)
            self._count += len(request.shape.sectors)
            return
        counted = self._written if kind in _WRITES else self._read
        first, last = request.regions
        if first == last:
            counted[first] = counted.get(first, 0) + request.shape.counted.sectors
            return
        for region in distinct(addresses[active] >> REGION_SHIFT).tolist():
            request_sectors = sectors_of(addresses, active & (addresses >> REGION_SHIFT == region), request.shape.width)
            counted[region] = counted.get(region, 0) + request_sectors.sectors

    def moved(self, memory: GlobalMemory) -> Moved:
        direct = _distinct([self._by_block(request) for request in self._kept[0]])
        every = _distinct([direct, *(self._by_block(request) for request in self._kept[1])])
        read = _by_region(every)
        indirect = {region: count - _by_region(direct).get(region, 0) for region, count in read.items()}
        for region, count in self._read.items():
            read[region] = read.get(region, 0) + count
        return Moved(
            read_bytes=_named(read, memory),
            indirect_bytes=_named({region: count for region, count in indirect.items() if count}, memory),
            written_bytes=_named(self._written, memory),
        )

    def _by_block(self, request: Request) -> Array:
        blocks = request.shape.sectors_warps.astype(np.int64) * WARP // self._lanes_of_block
        sectors: Array = request.sectors + (blocks << BLOCK_SHIFT)
        return sectors


def _distinct(kept: list[Array]) -> Array:
    return distinct(np.concatenate(kept)) if kept else np.zeros(0, np.int64)


def _by_region(kept: Array) -> dict[int, int]:
    """Sectors, of every block."""
    sectors = kept & ((1 << BLOCK_SHIFT) - 1)
    regions, counts = np.unique(sectors >> (REGION_SHIFT - _SECTOR_BITS), return_counts=True)
    return dict(zip(regions.tolist(), counts.tolist(), strict=True))


def _named(sectors: dict[int, int], memory: GlobalMemory) -> dict[str, int]:
    found: dict[str, int] = {}
    for index, count in sectors.items():
        region = memory.region_of(index)
        name = region.name if region else ELSEWHERE
        found[name] = found.get(name, 0) + count * SECTOR_BYTES
    return found
