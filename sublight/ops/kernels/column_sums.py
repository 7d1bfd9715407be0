"""Sums over rows, the same every time: programs add up rows in order, a second launch adds their shares.

For backward passes that write dx and on the way need its sum over rows, a bias's gradient. No atomics: their order
would be another every time. As many programs as the GPU holds at once walk down their columns side by side, a tile of
rows a step: what they read at one time lies together. Each thread adds up in its registers what it has written; only
at the end does a program add across threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sublight.backend.device import Facts
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.op import Buffer
from sublight.ops.kernels.pointwise import THREAD_BYTES, WARPS, block_for_columns
from sublight.ops.kernels.rows import Rows
from sublight.ops.record.tuning import Tile, tile_for

SHARES, SHARES_COLS = 256, 16  # shares and columns that one step of the second launch adds …
WIDE_SHARES, WIDE_COLS = 32, 128  # … and of rows so wide that there are programs enough with whole lines each
SHARE_ROWS = 4  # that a share stands for at least: writing and reading it moves 8 bytes a column, a row 4 to 8
FEW_ROWS = 128  # up to here one program takes all rows of its columns: a second launch would cost more
ROWS_EACH = 16  # of a program at least, or writing its share would take longer than that is worth
STEP = 2  # vectors of a thread and tensor that are on their way at once
MANY_WARPS, FEW_WARPS = (32, 64), (16, 128)  # that a multiprocessor holds, and registers of a thread so that it does


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How rows and columns are shared out over programs, and where each leaves its share of the sum `name`."""

    name: str
    cols: int
    tile: Tile
    parts: int  # blocks of columns
    shares: int  # programs of a block; each takes every shares-th tile

    @property
    def grid(self) -> tuple[int, int]:
        return self.parts, self.shares

    @property
    def into(self) -> str:
        """The buffer that programs write: one share is the sum itself."""
        return self.name if self.shares == 1 else "shares"

    def buffers(self, dtype: torch.dtype) -> dict[str, Buffer]:
        """The buffers for a sum over columns, and for its shares where there are several."""
        buffers = {self.name: Buffer(shape=(self.cols,), dtype=dtype)}
        if self.shares > 1:
            buffers["shares"] = Buffer(shape=(self.shares, self.cols), dtype=torch.float32)
        return buffers

    def steps(self) -> tuple[Step, ...]:
        """The launch that adds the shares up, where there are several."""
        if self.shares == 1:
            return ()
        return (add_shares(self.shares, self.cols, f"shares shares {self.name} {self.name}"),)


def share_out(kernel: str, layout: Rows, gpu: Facts, name: str) -> Sharing:
    """How the sum `name` over these rows is shared out among programs."""
    rows, cols, _, itemsize, *_ = layout
    warp = 32 * THREAD_BYTES // itemsize  # columns that it takes at once
    if rows <= FEW_ROWS:
        rule = Tile(block=warp // 4, rows=16, warps=4) if rows <= 16 else Tile(block=warp // 4, rows=64, warps=8)
    elif cols > warp // 2:  # warps have one row each: all its threads find it at one place, known without registers
        block = block_for_columns(cols, WARPS * warp, warp)
        warps = block // warp
        is_lean = itemsize == 2 and cols * itemsize % THREAD_BYTES == 0  # places of odd vectors take registers too
        held, registers = MANY_WARPS if is_lean else FEW_WARPS
        rule = Tile(block=block, rows=STEP, warps=warps, programs=held // warps, registers=registers)
    else:
        block = block_for_columns(cols, warp // 2)
        rule = Tile(block=block, rows=STEP * warp // block, warps=1, programs=FEW_WARPS[0], registers=FEW_WARPS[1])
    tile = tile_for(kernel, cols, itemsize, packable=False, capability=gpu.capability, rule=rule)
    parts = cdiv(cols, tile.block)
    shares = max(1, tile.programs * gpu.multiprocessors // parts)
    shares = min(shares, cdiv(rows, max(ROWS_EACH, tile.rows)))
    return Sharing(name=name, cols=cols, tile=tile, parts=parts, shares=shares)


@triton.jit
def add_to(total, rest, x, EXACT: tl.constexpr):
    """total + x; for fp32 results with the rest that rounding took from it (Knuth's two-sum)."""
    if EXACT:
        new = total + x
        part = new - total
        return new, rest + ((total - (new - part)) + (x - part))
    else:
        return total + x, rest


@triton.jit
def sum_of(total, rest, EXACT: tl.constexpr):
    """Over the rows of a tile, once a program; an infinite total has no rest."""
    if EXACT:
        wide = total.to(tl.float64) + tl.where(rest == rest, rest, 0.0).to(tl.float64)
        return tl.sum(wide, 0).to(tl.float32)
    else:
        return tl.sum(total, 0)


@triton.jit
def _add(share_ptr, out_ptr, shares, cols, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([SHARES, BLOCK], tl.float32)
    for start in tl.range(0, shares, SHARES, num_stages=3):
        share = start + tl.arange(0, SHARES)[:, None]
        mask = (share < shares) & (col < cols)[None, :]
        total += tl.load(share_ptr + share * cols + col[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + col, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _shares_kernel(
    share_ptr, other_share_ptr, out_ptr, other_out_ptr, shares, cols, SHARES: tl.constexpr, BLOCK: tl.constexpr
):
    """Shares added up in their order; of two sums side by side, a weight's gradient and a bias's."""
    if tl.program_id(1) == 0:
        _add(share_ptr, out_ptr, shares, cols, SHARES, BLOCK)
    else:
        _add(other_share_ptr, other_out_ptr, shares, cols, SHARES, BLOCK)


def add_shares(shares: int, cols: int, on: str, sums: int = 1) -> Step:
    """The second launch. Its time is that of a few loads one after the other: few steps, as many programs as fit."""
    step, width = (SHARES, SHARES_COLS) if cols <= 16384 else (WIDE_SHARES, WIDE_COLS)
    grid = (cdiv(cols, width), sums)
    return Step(_shares_kernel, grid, shares, cols, on=on, SHARES=step, BLOCK=width, num_warps=8)


def shares_for(rows: int, most: int, multiprocessors: int) -> int:
    """How many programs take so many rows: all that the GPU holds, unless their shares were as much as the rows.

    >>> shares_for(100_000, 792, 132), shares_for(1024, 792, 132), shares_for(50, 792, 132)
    (792, 256, 50)
    """
    return min(rows, most, max(multiprocessors, cdiv(rows, SHARE_ROWS)))
