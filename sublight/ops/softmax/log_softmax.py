"""Log-softmax over the last dimension; a row stays on chip, so device memory is touched twice: read x, write y.

The same three ways through a row as in `softmax`, and one exponential less: y = x - (largest + log of the sum). The
gradient needs only the sum of dy, so where a row is too wide to be held, the first pass reads dy alone.
"""

from __future__ import annotations

import torch

from sublight.backend.jit import tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.softmax import log_softmax as cost
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
from sublight.ops.softmax.plans import Kernels, register
from sublight.ops.softmax.softmax import SOFTMAX, exp_below, log_of


def reference(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


@triton.jit
def below(x, top, log_total):
    """x less the log of the row's sum; in two steps, so that a large `top` takes no digits of the log with it."""
    return (x.to(tl.float32) - top) - log_total


@triton.jit
def slope(dy, y, total):
    """The gradient: dy less its row's sum in the proportions of the softmax."""
    return dy.to(tl.float32) - exp_below(y, 0.0) * total


@triton.jit
def _tile_log_kernel(
    x_ptr, y_ptr, rows, cols, x_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf"))
    top = tl.max(x.to(tl.float32), 1)[:, None]
    total = sum_of(exp_below(x, top, EXACT=True), 1, SUMS)[:, None]
    tl.store(y_ptr + row * y_stride + col, below(x, top, log_of(total)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_log_kernel(
    x_ptr, y_ptr, cols, x_stride, y_stride, BLOCK: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf"))
    top = tl.max(x.to(tl.float32), 0)
    x = forget(x, top, PACKED)
    total = sum_of(exp_below(x, top, EXACT=True), 0, SUMS)
    x = forget(x, total, PACKED)
    tl.store(y_ptr + row * y_stride + col, below(x, top, log_of(total)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _trailing_log_kernel(
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
    total = sum_of(exp_below(x, base, EXACT=True), 0, SUMS)
    if VECTOR > 1:
        total += sum_of(exp_below(ends, base, EXACT=True), 0, SUMS)
    publish(part_ptr + first, top, total, first < units)
    if second >= 0:
        tops, totals = collect(part_ptr + old_row * parts, parts, PARTS)
        top = tl.max(tops, 0)
        log_total = log_of(sum_of(totals * exp_below(tops, top), 0, SUMS))
        place, inside = chunk_places(old_row * y_stride, old_part, cols, BLOCK, VECTOR)
        y = below(old, top, log_total).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + place, y, mask=inside, cache_modifier=".cs")
        if VECTOR > 1:
            place, inside = end_places(old_row * x_stride, old_part, cols, VECTOR)
            y = below(tl.load(x_ptr + place, mask=inside, other=0.0), top, log_total).to(y_ptr.dtype.element_ty)
            place, inside = end_places(old_row * y_stride, old_part, cols, VECTOR)
            tl.store(y_ptr + place, y, mask=inside)


@triton.jit
def _tile_log_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, rows, cols, dy_stride, y_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    y = tl.load(y_ptr + row * y_stride + col, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
    dx = slope(dy, y, sum_of(dy.to(tl.float32), 1, SUMS)[:, None])
    tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_log_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, cols, dy_stride, y_stride, BLOCK: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
    y = tl.load(y_ptr + row * y_stride + col, mask=mask, other=0.0)
    total = sum_of(dy.to(tl.float32), 0, SUMS)
    dx = slope(forget(dy, total, PACKED), y, total)
    tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _trailing_log_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, part_ptr, cols, dy_stride, y_stride, units, lag, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    second = first - lag
    row, part = (first // parts).to(tl.int64), first % parts
    col = part * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < tl.where(first < units, cols, 0), other=0.0)
    old_unit = tl.maximum(second, 0)
    old_row, old_part = (old_unit // parts).to(tl.int64), old_unit % parts
    old_col = old_part * BLOCK + tl.arange(0, BLOCK)
    inside = old_col < tl.where(second >= 0, cols, 0)
    y = tl.load(y_ptr + old_row * y_stride + old_col, mask=inside, other=0.0)
    old = tl.load(dy_ptr + old_row * dy_stride + old_col, mask=inside, other=0.0, eviction_policy="evict_first")
    total = sum_of(dy.to(tl.float32), 0, SUMS)
    publish(part_ptr + first, total, tl.full([], 1.0, tl.float32), first < units)  # the 1.0 says that it is there
    if second >= 0:
        totals, there = collect(part_ptr + old_row * parts, parts, PARTS)
        total = sum_of(tl.where(there > 0, totals, 0.0), 0, SUMS)
        dx = slope(old, y, total).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + old_row * cols + old_col, dx, mask=inside, cache_modifier=".cs")


FORWARD = Kernels(tile=_tile_log_kernel, row=_row_log_kernel, trailing=_trailing_log_kernel)
BACKWARD = Kernels(tile=_tile_log_backward_kernel, row=_row_log_backward_kernel, trailing=_trailing_log_backward_kernel)


KERNELS = (
    Kernel(jit=_tile_log_kernel),
    Kernel(jit=_row_log_kernel, spills="16 bytes a thread at 32,768 columns on a B200"),
    Kernel(jit=_trailing_log_kernel),
    *(Kernel(jit=jit) for jit in BACKWARD[:2]),
    Kernel(jit=_trailing_log_backward_kernel, spills="8 bytes a thread of fp32 rows of odd width on an H200"),
)


def _gradient(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dx = dy - exp(y) * sum(dy), in fp32 at least."""
    wide = torch.promote_types(y.dtype, torch.float32)
    dy_wide = dy.to(wide)
    return (dy_wide - y.to(wide).exp() * dy_wide.sum(-1, keepdim=True)).to(y.dtype)


_log_softmax, _log_softmax_backward = register(
    "log_softmax", forward=FORWARD, backward=BACKWARD, reference=reference, gradient=_gradient, why_torch=why_torch
)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Log-softmax over the last dimension: our kernel where it wins, PyTorch's elsewhere (`sublight.why` says)."""
    return _log_softmax.call(x)  # type: ignore[no-any-return]


def plan(x: torch.Tensor) -> Plan:
    """What `log_softmax(x)` runs, and why."""
    return _log_softmax.decide(x)


def launch(x: torch.Tensor) -> torch.Tensor:
    """Our forward kernel, whether or not it wins."""
    return _log_softmax.by_kernels(x)  # type: ignore[no-any-return]


def launch_backward(dy: torch.Tensor, x: torch.Tensor) -> Inputs:
    """Our backward kernel, on what the forward kernel gives."""
    return (_log_softmax_backward.by_kernels(dy, launch(x)),)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (random_rows(shape, dtype, device, seed, scale=3.0),)


WIDTHS = (768, 1600, 2560, 4096, 5120, 8192, 12288, 32768, 50257, 131072, 151936)
LOG_SOFTMAX = Op(
    name="log_softmax",
    summary="logarithm of the softmax over the last dimension",
    reference=reference,
    call=log_softmax,
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=launch_backward, kernels=KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=(*row_shapes(WIDTHS)[: len(WIDTHS)], *({"rows": rows, "cols": 4096} for rows in (1, 16, 128))),
    test_shapes=SOFTMAX.test_shapes,
)
