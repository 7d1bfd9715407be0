"""How softmax and log_softmax share rows out among programs, and their launches, which differ only in the kernels.

`tile` takes several narrow rows, `row` one that fits in registers, `trailing` what no multiprocessor holds: there every
program reduces one chunk and then finishes one that another has reduced, for which it waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, next_power_of_2
from sublight.ops.kernels.rows import as_rows, block_for, is_packed, is_ragged, split, sums_of
from sublight.ops.record.tuning import Tile, tile_for

TILE_COLS = 2048  # up to here several rows share a program
ROW_BYTES = 64 * 1024  # up to here two rows fit in a multiprocessor's registers
CHUNK = 8192  # columns that a program of the backward pass's `trailing` takes
LAG_BYTES = 6 * 2**20  # how far its second pass trails the first: as much as runs at once, well within the L2


class Kernels(NamedTuple):
    """One pass, by the width of its rows."""

    tile: Any
    row: Any
    trailing: Any
    splits: bool = False  # `row` may take a row as two blocks


def forward(kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
    """From x to a result of its shape."""
    x2 = as_rows(x)
    rows, cols = x2.shape
    y = torch.empty_like(x2, memory_format=torch.contiguous_format)
    item, sums, capability = x.element_size(), sums_of(x), facts(x).capability
    tile = plan("softmax", cols, item, packed=is_packed(x2), capability=capability, two=kernels.splits)
    if tile is None or (cols > TILE_COLS and is_ragged(x2, y)):
        vector = 16 // item if is_ragged(x2, y) else 1
        chunk, warps, registers = (4096, 4, None) if cols <= 32 * 4096 else (8192, 8, 80)
        parts = cdiv(cols + vector - 1, chunk)
        units, lag = trailing_units(rows, parts, chunk * item)
        part = torch.zeros(units, dtype=torch.int64, device=x.device)
        kernels.trailing[(units + lag,)](
            x2, y, part, cols, x2.stride(0), y.stride(0), units, lag, parts,
            BLOCK=chunk, PARTS=next_power_of_2(parts), VECTOR=vector, SUMS=sums,
            **Tile(block=chunk, warps=warps, registers=registers if item == 2 else None).options(),
        )  # fmt: skip
    elif cols <= TILE_COLS:
        kernels.tile[(cdiv(rows, tile.rows),)](
            x2, y, rows, cols, x2.stride(0), y.stride(0), ROWS=tile.rows, BLOCK=tile.block, SUMS=sums, **tile.options()
        )
    else:
        kernels.row[(rows,)](
            x2, y, cols, x2.stride(0), y.stride(0), BLOCK=tile.block, PACKED=tile.packed, SUMS=sums,
            **({"TAIL": tile.tail} if kernels.splits else {}), **tile.options(),
        )  # fmt: skip
    return y.view(x.shape)


def backward(kernels: Kernels, dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """From the result and its gradient to that of x."""
    dy2, y2 = as_rows(dy), as_rows(y)
    rows, cols = y2.shape
    dx = torch.empty_like(y2, memory_format=torch.contiguous_format)
    item, sums, packed = 2 * y.element_size(), sums_of(y), is_packed(dy2, y2)  # two tensors share the registers
    tile = plan("softmax_backward", cols, item, packed=packed, capability=facts(y).capability)
    if tile is None:
        parts = cdiv(cols, CHUNK)
        units, lag = trailing_units(rows, parts, CHUNK * item)
        part = torch.zeros(units, dtype=torch.int64, device=y.device)
        kernels.trailing[(units + lag,)](
            dy2, y2, dx, part, cols, dy2.stride(0), y2.stride(0), units, lag, parts,
            BLOCK=CHUNK, PARTS=next_power_of_2(parts), SUMS=sums, num_warps=8,
        )  # fmt: skip
    elif cols <= TILE_COLS:
        kernels.tile[(cdiv(rows, tile.rows),)](
            dy2, y2, dx, rows, cols, dy2.stride(0), y2.stride(0),
            ROWS=tile.rows, BLOCK=tile.block, SUMS=sums, **tile.options(),
        )  # fmt: skip
    else:
        kernels.row[(rows,)](
            dy2, y2, dx, cols, dy2.stride(0), y2.stride(0),
            BLOCK=tile.block, PACKED=tile.packed, SUMS=sums, **tile.options(),
        )  # fmt: skip
    return dx.view(y.shape)


def plan(
    kernel: str, cols: int, bytes_per_col: int, *, packed: bool, capability: int = 90, two: bool = False
) -> Tile | None:
    """How a row is shared out, in `two` blocks where it fills none; None where no multiprocessor holds it."""
    block = block_for(cols)
    rule: Tile | None
    if cols <= TILE_COLS:  # about 2 KB a warp: loads enough in flight, and few reductions leave their warp
        rule = Tile(rows=max(1, 1024 // block), block=block, warps=max(1, block * bytes_per_col // 2048))
    elif block * bytes_per_col > (ROW_BYTES if capability < 120 else ROW_BYTES // 2):  # GeForce spills there
        rule = None
    else:  # a thread holds 64 bytes of the row, in so few registers that two rows fit
        warps = min(32, max(4, block * bytes_per_col // 2048))
        registers = {8: 64, 16: 40, 32: 32}.get(warps) if packed else None
        if packed and warps == 32 and capability >= 100:  # where Blackwell's assembler spills
            warps, registers = 16, 64
        first, tail = split(cols) if two else (block, 0)
        rule = Tile(block=first, tail=tail, warps=warps, registers=registers, packed=packed)
    tile = tile_for(kernel, cols, bytes_per_col, packable=packed, capability=capability, rule=rule)
    return tile if two or tile is None or not tile.tail else rule  # a kernel of one block would leave the tail out


def trailing_units(rows: int, parts: int, chunk_bytes: int) -> tuple[int, int]:
    """Chunks in all, and how many programs the second pass trails the first: a whole row at least, or a program would
    wait for one that is yet to start, and never will where those that wait fill the GPU.

    >>> trailing_units(3, 8, 2**15), trailing_units(1000, 8, 2**15), trailing_units(2, 400, 2**15)
    ((24, 24), (8000, 192), (800, 400))
    """
    units = rows * parts
    return units, min(units, max(parts, LAG_BYTES // chunk_bytes))
