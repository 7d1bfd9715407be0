"""What a mixture of experts does to its rows beside the products: the gate between them, the sum behind them.

Each program takes a tile of rows and columns, several rows where they are short.
"""

from __future__ import annotations

from typing import NamedTuple

from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.op import Kernel
from sublight.ops.pointwise.activation import activate

MOST_COLS = 1024  # of a row that a program takes at once
TILE = 2048  # elements that it takes at once


@triton.jit
def _gate_kernel(hidden_ptr, inner_ptr, rows, parts, inner, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up of rows whose first half is gate and whose second is up."""
    unit = tl.program_id(0)
    row = ((unit // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = ((unit % parts) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (col < inner)
    gate = tl.load(hidden_ptr + row * 2 * inner + col, mask=inside)
    up = tl.load(hidden_ptr + (row * 2 + 1) * inner + col, mask=inside)
    value, _ = activate(gate.to(tl.float32), "silu", gate.dtype == tl.float32)
    tl.store(inner_ptr + row * inner + col, (value * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _gate_back_kernel(
    dinner_ptr, hidden_ptr, weights_ptr, source_ptr, ends_ptr, dhidden_ptr, weighted_ptr, dweights_ptr, inner, experts,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of rows: the gradients of gate and up, the row times its weight (for the gradient of `down`), and the gradient of
    the weight. `dinner` lacks the weight: it is dy times `down` turned.

    y is the sum of weight * (inner @ down), so dweight is (inner @ down) · dy, which is inner · (dy @ downᵀ): what the
    second product gave need not be kept.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < tl.load(ends_ptr + experts - 1)  # those behind have no pair
    pair = tl.load(source_ptr + row, mask=is_row, other=0)
    weight = tl.load(weights_ptr + pair, mask=is_row, other=0.0).to(tl.float32)[:, None]
    at = row[:, None]
    along = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, inner, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        inside = is_row[:, None] & (col < inner)
        gate = tl.load(hidden_ptr + at * 2 * inner + col, mask=inside, other=0.0)
        up = tl.load(hidden_ptr + (at * 2 + 1) * inner + col, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dinner_ptr + at * inner + col, mask=inside, other=0.0).to(tl.float32)
        value, slope = activate(gate.to(tl.float32), "silu", gate.dtype == tl.float32)
        along += dy * (value * up)
        dy *= weight
        tl.store(dhidden_ptr + at * 2 * inner + col, (dy * up * slope).to(gate.dtype), mask=inside)
        tl.store(dhidden_ptr + (at * 2 + 1) * inner + col, (dy * value).to(gate.dtype), mask=inside)
        tl.store(weighted_ptr + at * inner + col, (weight * value * up).to(gate.dtype), mask=inside)
    tl.store(dweights_ptr + pair, tl.sum(along, 1).to(dweights_ptr.dtype.element_ty), mask=is_row)


@triton.jit
def _combine_kernel(
    rows_ptr, place_ptr, weights_ptr, y_ptr, tokens, parts, cols,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of each token's rows, each times its weight or as it is, always in the same order."""
    unit = tl.program_id(0)
    token = (unit // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = ((unit % parts) * BLOCK + tl.arange(0, BLOCK))[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for slot in range(TOP_K):
        place = tl.load(place_ptr + token * TOP_K + slot, mask=token < tokens, other=-1).to(tl.int64)
        inside = (place >= 0)[:, None] & (col < cols)  # a pair without a row adds nothing
        x = tl.load(rows_ptr + place[:, None] * cols + col, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            x *= tl.load(weights_ptr + token * TOP_K + slot, mask=place >= 0, other=0.0).to(tl.float32)[:, None]
        total += x
    inside = (token < tokens)[:, None] & (col < cols)
    tl.store(y_ptr + token[:, None] * cols + col, total.to(y_ptr.dtype.element_ty), mask=inside)


_ODD = "rows of odd width begin anywhere, so their elements move one by one; a row's weight is one number"
KERNELS = tuple(Kernel(jit=kernel, narrow=_ODD) for kernel in (_gate_kernel, _gate_back_kernel, _combine_kernel))


class Tiles(NamedTuple):
    """How rows are shared out."""

    rows: int  # a program's
    cols: int
    down: int  # programs over all rows
    across: int  # over a row

    @property
    def options(self) -> dict[str, int]:
        return {"ROWS": self.rows, "BLOCK": self.cols, "num_warps": 4}


def tiles_of(rows: int, cols: int) -> Tiles:
    """
    >>> tiles_of(100, 768)
    Tiles(rows=2, cols=1024, down=50, across=1)
    """
    block = min(MOST_COLS, max(16, next_power_of_2(cols)))
    each = min(TILE // block, next_power_of_2(rows))
    return Tiles(each, block, cdiv(rows, each), cdiv(cols, block))
