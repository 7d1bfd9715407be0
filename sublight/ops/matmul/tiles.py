"""Which tile a product takes: by its shape and its GPU; never by trying at a user's first call.

A tile of C costs (BM + BN) * k elements of traffic from the L2 for BM * BN * k multiply-adds: larger tiles are better
as long as there are enough of them for all multiprocessors. What is left over in the last round of tiles (a wave) is time
in which most multiprocessors wait.
"""

from __future__ import annotations

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

    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages}

    def shared_bytes(self, itemsize: int) -> int:
        return self.stages * (self.bm + self.bn) * self.bk * itemsize


# in the order of what they reach where they fit (H200, bf16): TFLOP/s of a product that is nothing but whole waves
PERSISTENT = (
    Tile(bm=128, bn=256, bk=64, warps=8, stages=4),
    Tile(bm=128, bn=256, bk=64, warps=8, stages=3),
    Tile(bm=256, bn=128, bk=64, warps=8, stages=3),
    Tile(bm=128, bn=128, bk=64, warps=8, stages=4),
    Tile(bm=128, bn=128, bk=64, warps=4, stages=5),
    Tile(bm=64, bn=256, bk=64, warps=4, stages=4),
    Tile(bm=64, bn=128, bk=64, warps=4, stages=6),
    Tile(bm=64, bn=64, bk=64, warps=4, stages=8),
)
# share of the peak that a tile reaches when all multiprocessors are busy with it
REACHED = {(128, 256): 1.0, (256, 128): 0.98, (128, 128): 0.86, (64, 256): 0.84, (64, 128): 0.68, (64, 64): 0.45}


def persistent_tile(m: int, n: int, k: int, gpu: Facts) -> Tile:
    """The tile whose rounds over all multiprocessors take the least time, by count."""

    def seconds(tile: Tile) -> float:
        tiles = cdiv(m, tile.bm) * cdiv(n, tile.bn)
        rounds = cdiv(tiles, gpu.multiprocessors)
        return rounds * tile.bm * tile.bn / REACHED[tile.bm, tile.bn]

    first_of_each = {(tile.bm, tile.bn): tile for tile in reversed(PERSISTENT)}
    return min(first_of_each.values(), key=seconds)


def plain_tile(m: int, n: int, itemsize: int, gpu: Facts, *, is_ieee: bool) -> Tile:
    """For kernels that read by pointers; fp32 by plain multiply-adds takes small tiles, or its registers overflow."""
    if is_ieee:
        return Tile(bm=64, bn=64, bk=16, warps=8, stages=2)
    if m <= 16:
        return Tile(bm=16, bn=64, bk=128 // itemsize * 2, warps=4, stages=4)
    tiles = cdiv(m, 128) * cdiv(n, 128)
    if tiles >= gpu.multiprocessors and gpu.capability >= 80:
        return Tile(bm=128, bn=128, bk=128 // itemsize // 2, warps=8, stages=3)
    return Tile(bm=64, bn=64, bk=128 // itemsize, warps=4, stages=3)
