"""How softmax and log_softmax share rows out among programs: one set of plans, which differ in their kernels alone.

`tile` takes several narrow rows, `row` one that fits in registers, `trailing` what no multiprocessor holds: there every
program reduces one chunk and then finishes one that another has reduced, for which it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, next_power_of_2
from sublight.backend.launch import Step
from sublight.op import Buffer, Plan
from sublight.ops.kernels.rows import block_for, copies_of, is_ragged, rows_of, split, sums_of
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered
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


def register(
    name: str,
    *,
    forward: Kernels,
    backward: Kernels,
    reference: Callable[[torch.Tensor], torch.Tensor],
    gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    why_torch: Callable[[torch.Tensor], str],
) -> tuple[Registered, Registered]:
    """The op x -> y and the op (dy, y) -> dx; `reference` and `gradient` are the same in PyTorch's ops."""
    op_backward = Registered(
        schema=f"{name}_backward(Tensor dy, Tensor y) -> Tensor dx",
        reference=gradient,
        plan=partial(plan_backward, backward),
        fake=lambda dy, y: torch.empty_like(y, memory_format=torch.contiguous_format),
    )
    op = Registered(
        schema=f"{name}(Tensor x) -> Tensor y",
        reference=reference,
        theirs=f"torch.{name}",
        why_torch=why_torch,
        plan=partial(plan_forward, forward),
        fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
        gradient=Gradient(
            by=op_backward,
            saves=("y",),
            gives=("x",),
            by_torch=lambda saved, grads: (gradient(grads[0], saved["y"]),),
        ),
    )
    return op, op_backward


def in_python(call: Callable[..., Any]) -> Any:
    """What a `Gradient` is computed by, where the way into C++ (`backend/native`) does not know it."""
    return SimpleNamespace(call=call, native=SimpleNamespace(call=None))


def plan_forward(kernels: Kernels, x: torch.Tensor) -> Plan:
    """The plan of a forward pass, from x to a result of its shape."""
    layout = rows_of(x)
    rows, cols, item, sums = layout.rows, layout.cols, layout.itemsize, sums_of(x)
    tile = tile_of("softmax", cols, item, packed=layout.is_packed, capability=facts(x).capability, two=kernels.splits)
    ragged = is_ragged(layout, layout.in_one_piece)
    buffers = {"y": Buffer(shape=tuple(x.shape), dtype=x.dtype)}
    if tile is None or (cols > TILE_COLS and ragged):
        reason = f"{cols} columns: chunks, second pass from L2"
        vector = 16 // item if ragged else 1
        chunk, warps, registers = (4096, 4, None) if cols <= 32 * 4096 else (8192, 8, 80)
        tile = Tile(block=chunk, warps=warps, registers=registers if item == 2 else None)
        parts = cdiv(cols + vector - 1, chunk)
        units, lag = trailing_units(rows, parts, chunk * item)
        buffers["part"] = Buffer(shape=(units,), dtype=torch.int64, is_zero=True)
        step = Step(
            kernels.trailing, (units + lag,), cols, layout.apart, cols, units, lag, parts,
            on="x y part", tile=tile,
            BLOCK=chunk, PARTS=next_power_of_2(parts), VECTOR=vector, SUMS=sums, **tile.options(),
        )  # fmt: skip
    elif cols <= TILE_COLS:
        reason = f"{cols} columns: {tile.rows_text}"
        step = Step(
            kernels.tile, (cdiv(rows, tile.rows),), rows, cols, layout.apart, cols,
            on="x y", tile=tile, ROWS=tile.rows, BLOCK=tile.block, SUMS=sums, **tile.options(),
        )  # fmt: skip
    else:
        reason = f"{cols} columns: one row in registers"
        step = Step(
            kernels.row, (rows,), cols, layout.apart, cols,
            on="x y", tile=tile, BLOCK=tile.block, PACKED=tile.packed, SUMS=sums,
            **({"TAIL": tile.tail} if kernels.splits else {}), **tile.options(),
        )  # fmt: skip
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(x=layout.is_copy),
        buffers=buffers,
        steps=(step,),
        outputs=("y",),
    )


def plan_backward(kernels: Kernels, dy: torch.Tensor, y: torch.Tensor) -> Plan:
    """The plan of a backward pass, from the result and its gradient to the gradient of x."""
    grads, layout = rows_of(dy), rows_of(y)
    rows, cols, sums = layout.rows, layout.cols, sums_of(y)
    item, packed = 2 * layout.itemsize, grads.is_packed and layout.is_packed  # two tensors share the registers
    tile = tile_of("softmax_backward", cols, item, packed=packed, capability=facts(y).capability)
    strides = (grads.apart, layout.apart)
    buffers = {"dx": Buffer(shape=tuple(y.shape), dtype=y.dtype)}
    if tile is None:
        reason = f"{cols} columns: chunks, second pass from L2"
        parts = cdiv(cols, CHUNK)
        units, lag = trailing_units(rows, parts, CHUNK * item)
        buffers["part"] = Buffer(shape=(units,), dtype=torch.int64, is_zero=True)
        step = Step(
            kernels.trailing, (units + lag,), cols, *strides, units, lag, parts,
            on="dy y dx part", BLOCK=CHUNK, PARTS=next_power_of_2(parts), SUMS=sums, num_warps=8,
        )  # fmt: skip
    elif cols <= TILE_COLS:
        reason = f"{cols} columns: {tile.rows_text}"
        step = Step(
            kernels.tile, (cdiv(rows, tile.rows),), rows, cols, *strides,
            on="dy y dx", tile=tile, ROWS=tile.rows, BLOCK=tile.block, SUMS=sums, **tile.options(),
        )  # fmt: skip
    else:
        reason = f"{cols} columns: one row in registers"
        step = Step(
            kernels.row, (rows,), cols, *strides,
            on="dy y dx", tile=tile, BLOCK=tile.block, PACKED=tile.packed, SUMS=sums, **tile.options(),
        )  # fmt: skip
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(dy=grads.is_copy, y=layout.is_copy),
        buffers=buffers,
        steps=(step,),
        outputs=("dx",),
    )


def tile_of(
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
