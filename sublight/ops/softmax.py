"""Softmax over the last dimension; a row stays on chip, so device memory is touched twice: read x, write y.

Three kernels, by width. `tile` takes several narrow rows at once. `row` holds one row in registers, in its own 16-bit
form: converting again where it is needed costs an instruction, keeping the fp32 copy would cost half the rows that fit
on a multiprocessor. `trailing` is for rows that no multiprocessor can hold: every program first reduces one chunk, then
finishes a chunk that another reduced some thousand programs ago, which the L2 still holds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sublight.jit import tl, triton
from sublight.op import ITEMSIZE, Choice, Cost, Direction, Inputs, Kernel, Op, Shape, Thunk
from sublight.ops.library import LIBRARY, peer
from sublight.ops.rows import (
    Tile,
    as_rows,
    block_for,
    collect,
    facts,
    forget,
    is_packed,
    narrow_tile,
    publish,
    random_rows,
    row_shapes,
    why_torch,
    wide_tile,
)

LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is what the hardware has
LN2_HIGH = tl.constexpr(0.693359375)  # ten bits: its product with a whole number below 2**14 is exact
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)
TILE_COLS = 2048  # up to here several rows share a program
ROW_BYTES = 64 * 1024  # up to here two rows fit in a multiprocessor's registers
CHUNK = 8192  # columns that a program of `trailing` takes
LAG_BYTES = 16 * 2**20  # how far its second pass trails the first: well within the L2, well beyond what runs at once


def reference(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


@triton.jit
def exp_below(x, top):
    """exp(x - top). For 16-bit x one fused multiply-add and the hardware's exp2; for fp32 that would lose bits of the
    argument, so its whole part is taken off first (by ln 2 in two pieces, the first exact) and only the rest scaled."""
    if x.dtype == tl.float32:
        d = x - top
        d = tl.where(d < -150.0, -150.0, d)  # already zero in fp32, and -inf has no whole part
        whole = tl.floor(d * LOG2_E + 0.5)
        rest = d - whole * LN2_HIGH - whole * LN2_LOW
        return tl.exp2(whole) * tl.exp2(rest * LOG2_E)
    else:
        return tl.exp2(x.to(tl.float32) * LOG2_E - top * LOG2_E)


@triton.jit
def _tile_kernel(x_ptr, y_ptr, rows, cols, x_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf"))
    e = exp_below(x, tl.max(x.to(tl.float32), 1)[:, None])
    y = e / tl.sum(e, 1)[:, None]
    tl.store(y_ptr + row * y_stride + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_kernel(x_ptr, y_ptr, cols, x_stride, y_stride, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf"))
    top = tl.max(x.to(tl.float32), 0)
    x = forget(x, top, PACKED)
    total = tl.sum(exp_below(x, top), 0)
    x = forget(x, total, PACKED)
    e = exp_below(x, top)
    y = e * (1.0 / total) if PACKED else e / total  # a 16-bit result does not see the second rounding
    tl.store(y_ptr + row * y_stride + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _trailing_kernel(
    x_ptr, y_ptr, part_ptr, cols, x_stride, y_stride, units, lag, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)  # the chunk that this program reduces …
    second = first - lag  # … and the one that it finishes
    row, part = (first // parts).to(tl.int64), first % parts
    col = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + col, mask=col < tl.where(first < units, cols, 0), other=-float("inf"))
    old_unit = tl.maximum(second, 0)
    old_row, old_part = (old_unit // parts).to(tl.int64), old_unit % parts
    old_col = old_part * BLOCK + tl.arange(0, BLOCK)
    old_mask = old_col < tl.where(second >= 0, cols, 0)
    old = tl.load(x_ptr + old_row * x_stride + old_col, mask=old_mask, other=0.0, eviction_policy="evict_first")
    top = tl.max(x.to(tl.float32), 0)
    total = tl.sum(exp_below(x, tl.where(top == -float("inf"), 0.0, top)), 0)  # a masked chunk adds nothing
    publish(part_ptr + first, top, total, first < units)
    if second >= 0:
        tops, totals = collect(part_ptr + old_row * parts, parts, PARTS)
        top = tl.max(tops, 0)
        total = tl.sum(totals * exp_below(tops, top), 0)
        y = exp_below(old, top) / total
        y_ptrs = y_ptr + old_row * y_stride + old_col
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=old_mask, cache_modifier=".cs")


@triton.jit
def _tile_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, rows, cols, dy_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    y = tl.load(y_ptr + row * y_stride + col, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, 1)[:, None])
    tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, cols, dy_stride, y_stride, BLOCK: tl.constexpr, PACKED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    y = tl.load(y_ptr + row * y_stride + col, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
    dot = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 0)
    y, dy = forget(y, dot, PACKED), forget(dy, dot, PACKED)
    dx = y.to(tl.float32) * (dy.to(tl.float32) - dot)
    tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _trailing_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, part_ptr, cols, dy_stride, y_stride, units, lag, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    second = first - lag
    row, part = (first // parts).to(tl.int64), first % parts
    col = part * BLOCK + tl.arange(0, BLOCK)
    mask = col < tl.where(first < units, cols, 0)
    y = tl.load(y_ptr + row * y_stride + col, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
    dot = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 0)
    publish(part_ptr + first, dot, tl.full([], 1.0, tl.float32), first < units)  # the 1.0 says that it is there
    if second >= 0:
        row, part = (second // parts).to(tl.int64), second % parts
        col = part * BLOCK + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + row * y_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_first")
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_first")
        dots, there = collect(part_ptr + row * parts, parts, PARTS)
        dot = tl.sum(tl.where(there > 0, dots, 0.0), 0)
        dx = y.to(tl.float32) * (dy.to(tl.float32) - dot)
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols, cache_modifier=".cs")


def launch(x: torch.Tensor) -> torch.Tensor:
    """Our forward kernel, whatever `choose` would say."""
    x2 = as_rows(x)
    rows, cols = x2.shape
    y = torch.empty_like(x2, memory_format=torch.contiguous_format)
    packed = is_packed(x2)
    tile = plan(cols, x.element_size(), packed=packed, capability=facts(x).capability)
    if tile is None:
        parts = triton.cdiv(cols, CHUNK)
        units, lag = _units(rows, parts, x.element_size())
        part = torch.zeros(units, dtype=torch.int64, device=x.device)
        _trailing_kernel[(units + lag,)](
            x2, y, part, cols, x2.stride(0), y.stride(0), units, lag, parts,
            BLOCK=CHUNK, PARTS=triton.next_power_of_2(parts), num_warps=8,
        )  # fmt: skip
    elif cols <= TILE_COLS:
        _tile_kernel[(triton.cdiv(rows, tile.rows),)](
            x2, y, rows, cols, x2.stride(0), y.stride(0), ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.warps
        )
    else:
        _row_kernel[(rows,)](
            x2, y, cols, x2.stride(0), y.stride(0),
            BLOCK=tile.block, PACKED=packed, num_warps=tile.warps, **tile.options(),
        )  # fmt: skip
    return y.view(x.shape)


def launch_backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Our backward kernel: dx = y * (dy - sum(y * dy))."""
    dy2, y2 = as_rows(dy), as_rows(y)
    rows, cols = y2.shape
    dx = torch.empty_like(y2, memory_format=torch.contiguous_format)
    packed = is_packed(dy2, y2)
    tile = plan(cols, 2 * y.element_size(), packed=packed, capability=facts(y).capability)  # two tensors share the room
    if tile is None:
        parts = triton.cdiv(cols, CHUNK)
        units, lag = _units(rows, parts, 2 * y.element_size())
        part = torch.zeros(units, dtype=torch.int64, device=y.device)
        _trailing_backward_kernel[(units + lag,)](
            dy2, y2, dx, part, cols, dy2.stride(0), y2.stride(0), units, lag, parts,
            BLOCK=CHUNK, PARTS=triton.next_power_of_2(parts), num_warps=8,
        )  # fmt: skip
    elif cols <= TILE_COLS:
        _tile_backward_kernel[(triton.cdiv(rows, tile.rows),)](
            dy2, y2, dx, rows, cols, dy2.stride(0), y2.stride(0), ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.warps
        )
    else:
        _row_backward_kernel[(rows,)](
            dy2, y2, dx, cols, dy2.stride(0), y2.stride(0),
            BLOCK=tile.block, PACKED=packed, num_warps=tile.warps, **tile.options(),
        )  # fmt: skip
    return dx.view(y.shape)


def plan(cols: int, bytes_per_col: int, *, packed: bool, capability: int = 90) -> Tile | None:
    """How a row is shared out; None where no multiprocessor holds it."""
    if cols <= TILE_COLS:
        return narrow_tile(cols)
    block = block_for(cols)
    if block * bytes_per_col > (ROW_BYTES if capability < 120 else ROW_BYTES // 2):  # GeForce's assembler spills there
        return None
    return wide_tile(block, bytes_per_col, packed=packed, capability=capability)


def _units(rows: int, parts: int, bytes_per_col: int) -> tuple[int, int]:
    units = rows * parts
    return units, min(units, LAG_BYTES // (CHUNK * bytes_per_col))


def choose(x: torch.Tensor) -> Choice:
    """What `softmax(x)` runs, and why."""
    if reason := why_torch(x):
        return Choice(provider="torch", kernel="torch.softmax", reason=reason)
    cols = x.shape[-1]
    if plan(cols, x.element_size(), packed=True) is None:
        return Choice(
            provider="sublight", kernel="_trailing_kernel", reason=f"{cols} columns: chunks, second pass from L2"
        )
    if cols <= TILE_COLS:
        return Choice(provider="sublight", kernel="_tile_kernel", reason=f"{cols} columns: several rows a program")
    return Choice(provider="sublight", kernel="_row_kernel", reason=f"{cols} columns: one row in registers")


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension: our kernel where it wins, PyTorch's elsewhere (`sublight.why` says which)."""
    if choose(x).provider == "torch":
        return reference(x)
    return torch.ops.sublight.softmax(x)  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    (y,) = ctx.saved_tensors
    return torch.ops.sublight.softmax_backward(dy, y)  # type: ignore[no-any-return]


def _cpu_backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)  # type: ignore[no-any-return]


LIBRARY.op(
    "softmax(Tensor x) -> Tensor",
    cpu=lambda x: reference(x).contiguous(),
    cuda=launch,
    fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    backward=_backward,
    setup_context=_setup_context,
)
LIBRARY.op(
    "softmax_backward(Tensor dy, Tensor y) -> Tensor",
    cpu=_cpu_backward,
    cuda=launch_backward,
    fake=lambda dy, y: torch.empty_like(y, memory_format=torch.contiguous_format),
)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (random_rows(shape, dtype, device, seed, scale=3.0),)


def cost(shape: Shape, dtype: str, direction: Direction) -> Cost:
    item, n = ITEMSIZE[dtype], shape["rows"] * shape["cols"]
    if direction == "fwd":
        # read x, write y; subtract, exponential, sum, divide, maximum
        return Cost(read_bytes=item * n, write_bytes=item * n, flops={"vector_fp32": 5 * n})
    # read y and dy, write dx; multiply, sum, subtract, multiply
    return Cost(read_bytes=2 * item * n, write_bytes=item * n, flops={"vector_fp32": 4 * n})


def _liger(x: torch.Tensor) -> Thunk:
    return partial(peer("liger_kernel.ops.softmax", "LigerSoftmaxFunction").apply, x)


def _quack(x: torch.Tensor) -> Thunk:
    return partial(peer("quack.softmax", "softmax"), x)


WIDTHS = (768, 1024, 1600, 2048, 2560, 4096, 5120, 8192, 12288, 16384, 32768, 50257, 65536, 131072, 151936)
SOFTMAX = Op(
    name="softmax",
    summary="softmax over the last dimension",
    reference=reference,
    call=softmax,
    launch=launch,
    launch_backward=lambda dy, x: (launch_backward(dy, launch(x)),),
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=tuple(
        Kernel(jit=jit)
        for jit in (
            _tile_kernel,
            _row_kernel,
            _trailing_kernel,
            _tile_backward_kernel,
            _row_backward_kernel,
            _trailing_backward_kernel,
        )
    ),
    shapes=row_shapes(WIDTHS),
    test_shapes=(
        *({"rows": rows, "cols": cols} for rows, cols in ((1, 1), (3, 127), (65, 128), (17, 129), (5, 2048))),
        *({"rows": rows, "cols": cols} for rows, cols in ((3, 2049), (2, 16384), (2, 32769), (3, 40000))),
    ),
    peers={"liger": _liger, "quack": _quack},
)
