"""Which tile a product takes: by its shape and its GPU; never by trying at a user's first call.

A tile of C costs (BM + BN) * k elements of traffic from the L2 for BM * BN * k multiply-adds: larger tiles are better
as long as there are enough of them for all multiprocessors. In the last round of tiles, where few are left, most
multiprocessors wait.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sublight.backend.device import Facts
from sublight.backend.jit import cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A program's share of C, and what it gets to compute it with."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int  # blocks of A and B that are on their way at once
    group: int = 8  # rows of tiles that are taken together (`order.py`)
    is_flat: bool = True  # one loop over the blocks of all tiles: the next tile's are loaded while one is stored

    def options(self) -> dict[str, Any]:
        return {"BM": self.bm, "BN": self.bn, "BK": self.bk, "num_warps": self.warps, "num_stages": self.stages}

    def count(self, m: int, n: int) -> int:
        return cdiv(m, self.bm) * cdiv(n, self.bn)


# for Hopper's copy engine; the share of the tensor cores' rate that a tile reaches while all multiprocessors have one
PERSISTENT = {
    Tile(bm=128, bn=256, bk=64, warps=8, stages=4): 1.0,
    Tile(bm=256, bn=128, bk=64, warps=8, stages=3): 0.98,
    Tile(bm=128, bn=128, bk=64, warps=8, stages=4): 0.86,
    Tile(bm=64, bn=256, bk=64, warps=4, stages=4): 0.84,
    Tile(bm=64, bn=128, bk=64, warps=4, stages=6): 0.68,
    Tile(bm=64, bn=64, bk=64, warps=4, stages=8): 0.45,
}


TRIED: ContextVar[Tile | None] = ContextVar("TRIED", default=None)  # what `benchmarks/products.py` tries


def persistent_tile(m: int, n: int, gpu: Facts) -> Tile:
    """The tile whose rounds over all multiprocessors take the least time.

    >>> persistent_tile(4096, 4096, Facts()).bn, persistent_tile(64, 4096, Facts()).bm
    (256, 64)
    """

    def time(tile: Tile) -> float:
        return cdiv(tile.count(m, n), gpu.multiprocessors) * tile.bm * tile.bn / PERSISTENT[tile]

    return TRIED.get() or min(PERSISTENT, key=time)


def plain_tile(m: int, n: int, itemsize: int, gpu: Facts, *, is_ieee: bool) -> Tile:
    """For kernels that read by pointers; fp32 by plain multiply-adds takes small tiles, or its registers overflow."""
    if is_ieee:
        return Tile(bm=64, bn=64, bk=16, warps=8, stages=2)
    if m <= 16:
        return Tile(bm=16, bn=64, bk=256 // itemsize, warps=4, stages=4)
    large = Tile(bm=128, bn=128, bk=64 // itemsize, warps=8, stages=3)
    if large.count(m, n) >= gpu.multiprocessors:
        return large
    return Tile(bm=64, bn=64, bk=128 // itemsize, warps=4, stages=3)
