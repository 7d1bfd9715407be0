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


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the tiles of a product are shared out: whole rounds of them first, the others in pieces along k."""

    tile: Tile
    rounds: int = 0  # whole tiles that each multiprocessor takes before
    pieces: int = 1  # of each tile that is left; 1: every tile is one program's


# in blocks of 128 x 256 x 64, about 0.66 µs on an H200
FILL_BLOCKS = 4.0  # until the first block has come, and the last one is stored
PIECES_BLOCKS = 14.0  # to write pieces of tiles, and to add them up in a launch of its own
INVARIANT_TILE = Tile(bm=128, bn=128, bk=64, warps=8, stages=4)  # of `batch_invariant`: for one row, or for thousands
TRIED: ContextVar[Tile | None] = ContextVar("TRIED", default=None)  # what `benchmarks/products.py` tries
TRIED_SPLIT: ContextVar[Split | None] = ContextVar("TRIED_SPLIT", default=None)


def persistent_tile(m: int, n: int, gpu: Facts) -> Tile:
    """The tile whose rounds over all multiprocessors take the least time.

    >>> persistent_tile(4096, 4096, Facts()).bn, persistent_tile(64, 4096, Facts()).bm
    (256, 64)
    """

    def time(tile: Tile) -> float:
        return cdiv(tile.count(m, n), gpu.multiprocessors) * tile.bm * tile.bn / PERSISTENT[tile]

    return TRIED.get() or min(PERSISTENT, key=time)


def split_of(m: int, n: int, k: int, gpu: Facts) -> Split:
    """The tile and the pieces that take the least time.

    >>> split_of(512, 10240, 8192, Facts()).pieces, split_of(4096, 4096, 4096, Facts()).pieces
    (4, 1)
    """
    if tried := TRIED_SPLIT.get():
        return tried
    return min(splits(m, n, k, gpu), key=lambda split: split_blocks(split, m, n, k, gpu))


def splits(m: int, n: int, k: int, gpu: Facts) -> list[Split]:
    """All ways that are worth a look: whole tiles, and those of the last round in as many pieces as find a program."""
    tile, programs = next(iter(PERSISTENT)), gpu.multiprocessors
    rounds, left = divmod(tile.count(m, n), programs)
    most = min(programs // left, cdiv(k, tile.bk) // 4) if left else 1  # at least four blocks: else nothing overlaps
    whole = Split(tile=persistent_tile(m, n, gpu))
    return [whole, *(Split(tile=tile, rounds=rounds, pieces=pieces) for pieces in range(2, most + 1))]


def split_blocks(split: Split, m: int, n: int, k: int, gpu: Facts) -> float:
    """How long a product takes, in blocks of 128 x 256 x 64.

    >>> whole, *_, split = splits(512, 10240, 8192, Facts())
    >>> split_blocks(whole, 512, 10240, 8192, Facts()) > split_blocks(split, 512, 10240, 8192, Facts())
    True
    """
    tile, steps = split.tile, cdiv(k, split.tile.bk)
    a_block = tile.bm * tile.bn / (128 * 256) / PERSISTENT.get(tile, 1.0)
    if split.pieces == 1:
        return cdiv(tile.count(m, n), gpu.multiprocessors) * steps * a_block + FILL_BLOCKS
    return (split.rounds * steps + cdiv(steps, split.pieces)) * a_block + FILL_BLOCKS + PIECES_BLOCKS


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
