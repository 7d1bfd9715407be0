"""What an access asks for, worked out once for all turns of a loop that ask for the same at another place.

Sectors, lines and banks repeat every 128 bytes, and each warp is counted for itself: where every warp's addresses moved
by a multiple of that, what was counted before holds again. Each instruction's last few patterns are kept, for the
stages of a loop take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from sublight.xray.occupancy.sm import WARP
from sublight.xray.ptx.memory import REGION_SHIFT
from sublight.xray.ptx.numbers import Array
from sublight.xray.ptx.transactions import LINE_BYTES, SECTOR_BYTES, Sectors, sectors_of

MOST_PATTERNS = 6  # of an instruction
_LINES = ~np.int64(LINE_BYTES - 1)
_SECTOR_BITS = SECTOR_BYTES.bit_length() - 1
_NOWHERE = np.int64(2**62)  # where a lane that is off points to: behind everything
BLOCK_SHIFT = 50  # above every sector's number

T = TypeVar("T")


@dataclass(slots=True)
class _Kept(Generic[T]):
    active: Array
    places: tuple[Array, ...]  # from their bases
    value: T


@dataclass(slots=True)
class Patterns(Generic[T]):
    """Remembers what was worked out for an instruction's patterns."""

    _kept: dict[Hashable, list[_Kept[T]]] = field(default_factory=dict)

    def of(self, key: Hashable, active: Array, places: tuple[Array, ...], work_out: Callable[[], T]) -> T:
        """`places` are addresses from their warps' bases, or whatever else it hangs on."""
        recent = self._kept.setdefault(key, [])
        for one in recent:
            if (one.active is active or np.array_equal(one.active, active)) and all(
                map(np.array_equal, one.places, places)
            ):
                return one.value
        value = work_out()
        recent.insert(0, _Kept(active, places, value))
        del recent[MOST_PATTERNS:]
        return value


def from_bases(addresses: Array) -> tuple[Array, Array]:
    """Each warp's base, a multiple of 128, and its lanes' addresses from there; 32 lanes a row.

    >>> bases, places = from_bases(np.arange(64) * 4 + 256)
    >>> bases.tolist(), places[:, -1].tolist()
    ([256, 384], [124, 124])
    """
    rows = addresses.reshape(-1, WARP)
    bases = rows[:, 0] & _LINES
    return bases, rows - bases[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What one execution of an access to global memory asks for; addresses are from the bases of their warps."""

    width: int
    counted: Sectors
    lanes: int
    low: Array  # of each warp that asks
    high: Array
    asking: Array  # those warps
    starts: Array  # distinct ones of each warp
    warps: Array  # of each of them
    sectors: Array  # distinct ones of each warp
    sectors_warps: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A pattern somewhere."""

    shape: RequestShape
    bases: Array  # of every warp

    @property
    def regions(self) -> tuple[int, int]:
        """The first and the last region that it may touch."""
        bases = self.bases[self.shape.asking]
        return (
            int((bases + self.shape.low).min()) >> REGION_SHIFT,
            int((bases + self.shape.high).max()) >> REGION_SHIFT,
        )

    @property
    def starts(self) -> Array:
        starts: Array = self.shape.starts + self.bases[self.shape.warps]
        return starts

    @property
    def sectors(self) -> Array:
        sectors: Array = self.shape.sectors + (self.bases[self.shape.sectors_warps] >> _SECTOR_BITS)
        return sectors


def shape_of(places: Array, active: Array, width: int) -> RequestShape:
    """Of rows of 32 addresses from their bases, with at least one active lane."""
    rows = np.sort(np.where(active.reshape(-1, WARP), places, _NOWHERE), axis=1)
    warps, starts = _fresh(rows)
    sectors_warps, sectors = _fresh(np.where(rows == _NOWHERE, rows, rows >> _SECTOR_BITS))
    asking = np.flatnonzero(rows[:, 0] != _NOWHERE)
    some = rows[asking]
    lowest = some.min() & _LINES  # a lane may lie before its warp's first
    return RequestShape(
        width=width,
        counted=sectors_of((places - lowest).reshape(-1), active, width),
        lanes=int(active.sum()),
        low=some[:, 0],
        high=np.where(some == _NOWHERE, some[:, :1], some).max(1),
        asking=asking,
        starts=starts,
        warps=warps,
        sectors=sectors,
        sectors_warps=sectors_warps,
    )


def _fresh(rows: Array) -> tuple[Array, Array]:
    """The distinct numbers of sorted rows, and the row of each."""
    fresh = rows != _NOWHERE
    fresh[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    row, column = np.nonzero(fresh)
    return row, rows[row, column]
