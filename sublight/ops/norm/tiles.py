"""How the norms' kernels share rows out: what a program holds, with how many warps, and what is on its way to it."""

from __future__ import annotations

from sublight.backend.device import Facts, is_interpreted
from sublight.ops.kernels.rows import block_for, split
from sublight.ops.record.tuning import Tile, planned, tile_for

TILE_COLS = 512  # up to here several rows share a program
MAX_COLS = 16384  # up to here a multiprocessor's registers hold a row in fp32 …
MAX_PACKED_COLS = 65536  # … and in its 16-bit form
FEW_COLS = 256  # of a warp there
FEW_ROWS = 2  # a multiprocessor: up to here a row's own latency counts, not how many are under way
BACKWARD_BYTES = 32 * 1024  # of x; with dy, the weight and the fp32 sums this is what the registers hold


@planned
def tile_of(
    name: str, cols: int, itemsize: int, *, packed: bool, capability: int = 90, few: bool = False
) -> Tile | None:
    """How the forward pass shares a row out; None where no multiprocessor holds it."""
    whole = block_for(cols)
    if whole > MAX_COLS and not (packed and whole <= MAX_PACKED_COLS):
        return None
    block, tail = (whole, 0) if cols <= TILE_COLS else split(cols)
    if few and whole <= MAX_COLS:  # all the threads there are, each with one load
        return Tile(block=block, tail=tail, warps=min(32, max(1, whole // FEW_COLS)))
    if cols <= TILE_COLS:  # about 2 KB a warp, so that few reductions leave their warp
        return Tile(rows=max(1, 1024 // whole), block=whole, warps=max(1, whole * itemsize // 2048))
    if whole > MAX_COLS:  # in two blocks always, one after the other: fewer registers at once
        block, tail = (block, tail) if tail else (block // 2, block // 2)
        rule = Tile(block=block, tail=tail, warps=16 if whole <= 32768 else 32, registers=64, packed=True)
    else:  # few warps, each with much of the row: the barriers of a reduction cost more than registers do here
        rule = Tile(block=block, tail=tail, warps=max(1, block // (1024 if itemsize == 2 else 512)), packed=packed)
    return tile_for(name, cols, itemsize, packable=packed, capability=capability, rule=rule)


@planned
def tile_of_backward(name: str, cols: int, itemsize: int, gpu: Facts, *, packed: bool) -> Tile | None:
    """The tile of programs that take many rows each: how many programs and warps, and how many rows are in flight."""
    block = block_for(cols)
    if is_interpreted():
        return Tile(block=block, warps=4, programs=1) if block * itemsize <= BACKWARD_BYTES else None
    fits = 2 * 2 * block * itemsize + 1024 <= gpu.shared_bytes  # two rows ahead, of x and of dy
    rule: Tile | None
    if block * itemsize > BACKWARD_BYTES:  # shared out over programs, 8,192 columns each, where that was tried
        parts = block // 8192
        is_ring = packed and gpu.capability == 90
        rule = Tile(block=block, warps=8, registers=128, programs=2, stages=3, parts=parts) if is_ring else None
    elif block <= 1024:
        rule = Tile(block=block, warps=4, registers=128, packed=True, programs=4, stages=4)
    elif block <= 4096:
        rule = Tile(block=block, warps=8, registers=128, packed=True, programs=2, stages=3)
    elif itemsize == 4:
        rule = Tile(block=block, warps=32, registers=64, programs=1, stages=3 if fits else 2)
    else:
        rule = Tile(block=block, warps=16, registers=128, packed=True, programs=1, stages=3 if fits else 2)
    return tile_for(name, cols, itemsize, packable=packed, capability=gpu.capability, rule=rule, near=True)
