"""Which of cross_entropy's kernels takes which rows, and how it shares them out."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from sublight.ops.cross_entropy.options import Options
from sublight.ops.kernels.rows import Rows, is_ragged
from sublight.ops.record.tuning import TUNED_CAPABILITY, Tile, tile_for
from sublight.ops.softmax import plans
from sublight.ops.softmax.plans import ROW_BYTES, TILE_COLS

REGISTERS = {8192: 64, 16384: 80, 32768: 128}  # a packed row of eight warps, two rows to a multiprocessor or more
NARROW_COLS = 512  # up to here several rows share a program; above, a warp takes 2 KB of one
Name = Literal["tile", "row", "trailing"]


def tile_of(x: Rows, d: Rows, options: Options, capability: int) -> tuple[Name, Tile]:
    """The tile for logits x whose gradient goes to d."""
    item, cols = x.itemsize, x.cols
    packed = x.is_packed and d.is_packed
    plain = not options.softcap and not options.label_smoothing  # else arithmetic needs registers more than rows do
    tile = plans.tile_of("cross_entropy", cols, item, packed=packed, capability=capability)
    ragged = cols > TILE_COLS and is_ragged(x, d)
    name: Name
    if tile is None or ragged or not (plain or tile.block * item <= ROW_BYTES // 2):
        name, table, tile = "trailing", "cross_entropy_trailing", Tile(block=4096, warps=4)
    else:
        name, table = ("tile" if cols <= NARROW_COLS else "row"), "cross_entropy"
        if NARROW_COLS < cols <= TILE_COLS:
            tile = Tile(block=tile.block, warps=max(1, tile.block * item // 2048), packed=packed)
        elif packed and plain and tile.block in REGISTERS:
            tile = replace(tile, warps=8, registers=REGISTERS[tile.block])
    if not plain or capability != TUNED_CAPABILITY:  # fewer registers than it asks for are tried out there alone
        tile = replace(tile, registers=None)
    if not plain and name == "trailing":
        tile = replace(tile, warps=2 * tile.warps)
    return name, tile_for(table, cols, item, packable=packed and plain, capability=capability, rule=tile)
