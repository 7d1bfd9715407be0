"""Softmax over the last dimension; a row stays on chip, so device memory is touched twice: read x, write y.

Three kernels, by width. `tile` takes several narrow rows at once. `row` holds one row in registers, in its own 16-bit
form: converting again where it is needed costs an instruction, keeping the fp32 copy would cost half the rows that fit
on a multiprocessor. `trailing` is for rows that no multiprocessor can hold: every program first reduces one chunk, then
finishes a chunk that another reduced some thousand programs ago, which the L2 still holds.
"""

from __future__ import annotations

from functools import partial

import torch

from sublight.backend.device import is_interpreted
from sublight.backend.jit import libdevice, tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.softmax import softmax as cost
from sublight.op import Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import (
    chunk_places,
    collect,
    end_places,
    forget,
    publish,
    random_rows,
    row_shapes,
    sum_of,
    why_torch,
)
from sublight.ops.record.library import peer
from sublight.ops.softmax.plans import TILE_COLS, Kernels, register
from sublight.timing import Thunk

LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is what the hardware has
INTERPRETED = tl.constexpr(is_interpreted())  # which has NumPy's exponential, and no library of CUDA's


def reference(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


@triton.jit
def exp_below(x, top, EXACT: tl.constexpr = False):
    """exp(x - top). For 16-bit x one multiply-add and the hardware's exp2, with EXACT after a subtraction that loses
    nothing, for sums that are themselves a result; both would lose bits of an fp32 result, which takes CUDA's expf."""
    if x.dtype == tl.float32:
        return tl.exp(x - top) if INTERPRETED else libdevice.exp(x - top)
    elif EXACT:
        return tl.exp2((x.to(tl.float32) - top) * LOG2_E)
    else:
        return tl.exp2(x.to(tl.float32) * LOG2_E - top * LOG2_E)


@triton.jit
def log_of(x):
    """The logarithm to all its digits: it is taken once a row, and the hardware's loses some."""
    return tl.log(x) if INTERPRETED else libdevice.log(x)


@triton.jit
def share_of(e, total, kind: tl.constexpr):
    """e / total; a 16-bit result does not see the second rounding of a product with the reciprocal."""
    return tl.div_rn(e, total + tl.zeros_like(e)) if kind == tl.float32 else e * (1.0 / total)


@triton.jit
def _tile_kernel(
    x_ptr, y_ptr, rows, cols, x_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf"))
    e = exp_below(x, tl.max(x.to(tl.float32), 1)[:, None])
    y = share_of(e, sum_of(e, 1, SUMS)[:, None], x.dtype)
    tl.store(y_ptr + row * y_stride + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_kernel(
    x_ptr, y_ptr, cols, x_stride, y_stride,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * x_stride, y_ptr + row * y_stride
    col = tl.arange(0, BLOCK)
    mask = col < (cols if TAIL == 0 else BLOCK)  # the first of two blocks is full
    x = tl.load(x_row + col, mask=mask, other=-float("inf"))
    top = tl.max(x.to(tl.float32), 0)
    if TAIL > 0:
        far = BLOCK + tl.arange(0, TAIL)
        rest = tl.load(x_row + far, mask=far < cols, other=-float("inf"))
        top = tl.maximum(top, tl.max(rest.to(tl.float32), 0))
        rest = forget(rest, top, PACKED)
    x = forget(x, top, PACKED)
    total = sum_of(exp_below(x, top), 0, SUMS)
    if TAIL > 0:
        total += sum_of(exp_below(rest, top), 0, SUMS)
        rest = forget(rest, total, PACKED)
    x = forget(x, total, PACKED)
    y = share_of(exp_below(x, top), total, x.dtype)
    tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=mask)
    if TAIL > 0:
        y = share_of(exp_below(rest, top), total, rest.dtype)
        tl.store(y_row + far, y.to(y_ptr.dtype.element_ty), mask=far < cols)


@triton.jit
def _trailing_kernel(
    x_ptr, y_ptr, part_ptr, cols, x_stride, y_stride, units, lag, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, VECTOR: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)  # the chunk that this program reduces …
    second = first - lag  # … and the one that it finishes
    row, part = (first // parts).to(tl.int64), first % parts
    here = tl.where(first < units, cols, 0)
    place, inside = chunk_places(row * x_stride, part, here, BLOCK, VECTOR)
    x = tl.load(x_ptr + place, mask=inside, other=-float("inf"))
    old_unit = tl.maximum(second, 0)
    old_row, old_part = (old_unit // parts).to(tl.int64), old_unit % parts
    old_place, old_inside = chunk_places(old_row * x_stride, old_part, tl.where(second >= 0, cols, 0), BLOCK, VECTOR)
    old = tl.load(x_ptr + old_place, mask=old_inside, other=0.0, eviction_policy="evict_first")
    top = tl.max(x.to(tl.float32), 0)
    if VECTOR > 1:
        place, inside = end_places(row * x_stride, part, here, VECTOR)
        ends = tl.load(x_ptr + place, mask=inside, other=-float("inf"))
        top = tl.maximum(top, tl.max(ends.to(tl.float32), 0))
    base = tl.where(top == -float("inf"), 0.0, top)  # a masked chunk adds nothing
    total = sum_of(exp_below(x, base), 0, SUMS)
    if VECTOR > 1:
        total += sum_of(exp_below(ends, base), 0, SUMS)
    publish(part_ptr + first, top, total, first < units)
    if second >= 0:
        tops, totals = collect(part_ptr + old_row * parts, parts, PARTS)
        top = tl.max(tops, 0)
        total = sum_of(totals * exp_below(tops, top), 0, SUMS)
        y = share_of(exp_below(old, top), total, old.dtype).to(y_ptr.dtype.element_ty)
        place, inside = chunk_places(old_row * y_stride, old_part, cols, BLOCK, VECTOR)
        tl.store(y_ptr + place, y, mask=inside, cache_modifier=".cs")
        if VECTOR > 1:
            place, inside = end_places(old_row * x_stride, old_part, cols, VECTOR)
            ends = tl.load(x_ptr + place, mask=inside, other=0.0)
            y = share_of(exp_below(ends, top), total, ends.dtype).to(y_ptr.dtype.element_ty)
            place, inside = end_places(old_row * y_stride, old_part, cols, VECTOR)
            tl.store(y_ptr + place, y, mask=inside)


@triton.jit
def _tile_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, rows, cols, dy_stride, y_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    y = tl.load(y_ptr + row * y_stride + col, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    dx = y * (dy - sum_of(y * dy, 1, SUMS)[:, None])
    tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, cols, dy_stride, y_stride, BLOCK: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    y = tl.load(y_ptr + row * y_stride + col, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
    dot = sum_of(y.to(tl.float32) * dy.to(tl.float32), 0, SUMS)
    y, dy = forget(y, dot, PACKED), forget(dy, dot, PACKED)
    dx = y.to(tl.float32) * (dy.to(tl.float32) - dot)
    tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _trailing_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, part_ptr, cols, dy_stride, y_stride, units, lag, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    second = first - lag
    row, part = (first // parts).to(tl.int64), first % parts
    col = part * BLOCK + tl.arange(0, BLOCK)
    mask = col < tl.where(first < units, cols, 0)
    y = tl.load(y_ptr + row * y_stride + col, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
    dot = sum_of(y.to(tl.float32) * dy.to(tl.float32), 0, SUMS)
    publish(part_ptr + first, dot, tl.full([], 1.0, tl.float32), first < units)  # the 1.0 says that it is there
    if second >= 0:
        row, part = (second // parts).to(tl.int64), second % parts
        col = part * BLOCK + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + row * y_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_first")
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_first")
        dots, there = collect(part_ptr + row * parts, parts, PARTS)
        dot = sum_of(tl.where(there > 0, dots, 0.0), 0, SUMS)
        dx = y.to(tl.float32) * (dy.to(tl.float32) - dot)
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols, cache_modifier=".cs")


FORWARD = Kernels(tile=_tile_kernel, row=_row_kernel, trailing=_trailing_kernel, splits=True)
BACKWARD = Kernels(tile=_tile_backward_kernel, row=_row_backward_kernel, trailing=_trailing_backward_kernel)


def _gradient(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dx = y * (dy - sum(y * dy)), in fp32 at least."""
    wide = torch.promote_types(y.dtype, torch.float32)
    y_wide, dy_wide = y.to(wide), dy.to(wide)
    return (y_wide * (dy_wide - (y_wide * dy_wide).sum(-1, keepdim=True))).to(y.dtype)


def _why_torch(x: torch.Tensor) -> str:
    reason = why_torch(x)
    if not reason and x.shape[-1] > TILE_COLS and x.shape[-1] % 16:
        return f"odd widths above {TILE_COLS} columns: PyTorch took 242 µs for 2670x50257 on an H200, ours 274 µs"
    return reason


_softmax, SOFTMAX_BACKWARD = register(
    "softmax", forward=FORWARD, backward=BACKWARD, reference=reference, gradient=_gradient, why_torch=_why_torch
)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension: our kernel where it wins, PyTorch's elsewhere (`sublight.why` says which)."""
    return _softmax.call(x)  # type: ignore[no-any-return]


def plan(x: torch.Tensor) -> Plan:
    """What `softmax(x)` runs, and why."""
    return _softmax.decide(x)


def launch(x: torch.Tensor) -> torch.Tensor:
    """Our forward kernel, whether or not it wins."""
    return _softmax.by_kernels(x)  # type: ignore[no-any-return]


def launch_backward(dy: torch.Tensor, x: torch.Tensor) -> Inputs:
    """Our backward kernel, on what the forward kernel gives."""
    return (SOFTMAX_BACKWARD.by_kernels(dy, launch(x)),)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (random_rows(shape, dtype, device, seed, scale=3.0),)


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
    plan=plan,
    providers={
        "sublight": Provider(
            launch=launch,
            backward=launch_backward,
            kernels=tuple(Kernel(jit=jit) for jit in (*FORWARD[:3], *BACKWARD[:3])),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=row_shapes(WIDTHS),
    test_shapes=(
        *({"rows": rows, "cols": cols} for rows, cols in ((1, 1), (3, 127), (65, 128), (17, 129), (5, 2048))),
        *({"rows": rows, "cols": cols} for rows, cols in ((3, 2049), (2, 16384), (2, 32769), (3, 40000))),
    ),
    peers={"liger": _liger, "quack": _quack},
)
