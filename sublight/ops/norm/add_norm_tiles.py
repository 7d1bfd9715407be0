"""How the kernels of add_norm share rows out: what a program holds, how many there are, what is on its way to them."""

from __future__ import annotations

from dataclasses import replace

from sublight.backend.device import Facts, is_interpreted
from sublight.ops.kernels.rows import block_for
from sublight.ops.norm.tiles import FEW_ROWS
from sublight.ops.record.tuning import Tile, planned, tile_for

TILE_COLS = 2048  # up to here several rows may share a program
MAX_COLS = 16384  # up to here a multiprocessor's registers hold a row in fp32 …
MAX_PACKED_COLS = 32768  # … and in its 16-bit form
BACKWARD_BYTES = 32 * 1024  # of a row; with both gradients, the weight and the fp32 sums this is what registers hold
CHUNK_BYTES = 16 * 1024  # of a row that is taken in chunks
GROUP = 32  # wide rows whose share of the weight's gradient one program adds up, while the L2 has them


@planned
def tile_of(kernel: str, cols: int, itemsize: int, *, packed: bool, capability: int = 90, few: bool = False) -> Tile:
    """How the forward pass shares a row out; a block narrower than the row is a chunk of it."""
    block = block_for(cols)
    if block > MAX_COLS and not (packed and block <= MAX_PACKED_COLS):
        rule = Tile(block=CHUNK_BYTES // itemsize, warps=16, stages=3)
    elif few and block <= MAX_COLS:  # all the threads there are, each with one load of either input
        kernel, rule = f"{kernel}_few", Tile(block=block, warps=min(32, max(1, block // 256)))
    elif cols <= TILE_COLS:  # about 1 KB of either input a warp
        rows = max(1, 1024 // block)
        rule = Tile(rows=rows, block=block, warps=max(1, rows * block * itemsize // 1024))
    elif packed:  # so few registers that 128 KB are on their way to a multiprocessor at once
        rule = Tile(block=block, warps=min(32, block // 1024), registers=64, packed=True)
    else:
        rule = Tile(block=block, warps=max(4, block // 1024))
    return tile_for(kernel, cols, itemsize, packable=packed, capability=capability, rule=rule)


@planned
def tile_of_backward(kernel: str, cols: int, itemsize: int, gpu: Facts, *, packed: bool, few: bool = False) -> Tile:
    """Of a row that is held: how many programs, with what, and how many rows are on their way; else of its chunks."""
    block = block_for(cols)
    if block * itemsize > BACKWARD_BYTES:
        rule = Tile(block=CHUNK_BYTES // itemsize, rows=GROUP, warps=16, registers=128, stages=3)
    elif few:  # a row a program: nothing to load ahead
        warps = min(16, max(1, block // 256))
        kernel, rule = f"{kernel}_few", Tile(block=block, warps=warps, programs=FEW_ROWS, packed=packed)
    elif block <= 1024:
        rows = max(1, 8192 // (block * itemsize))
        rule = Tile(block=block, rows=rows, warps=4, registers=128, packed=packed, programs=4, stages=3)
    elif block <= 2048:
        rule = Tile(block=block, warps=4, registers=128, packed=packed, programs=4, stages=4)
    elif block <= 4096:
        rule = Tile(block=block, warps=8, registers=128, packed=packed, programs=2, stages=4)
    else:
        rule = Tile(block=block, warps=16, registers=128, packed=packed, programs=1, stages=3)
    if is_interpreted():
        return replace(rule, programs=1)
    while not _fits(rule, cols, itemsize, gpu) and max(rule.stages - 1, rule.programs) > 1:
        rule = replace(rule, stages=rule.stages - 1) if rule.stages > 2 else replace(rule, programs=rule.programs - 1)
    return tile_for(kernel, cols, itemsize, packable=packed, capability=gpu.capability, rule=rule, near=True)


def _fits(tile: Tile, cols: int, itemsize: int, gpu: Facts) -> bool:
    """Shared memory holds what is on its way: rows of two gradients and of the sum, or chunks of these and a weight."""
    held = tile.block >= cols
    ahead = (tile.stages - 1) * (3 * tile.rows if held else 4) * tile.block * itemsize
    return max(1, tile.programs) * (ahead + 1024) <= gpu.shared_bytes
