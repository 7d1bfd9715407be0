"""Softmax and the log of its sum; largest value and sum are found together, in one pass over chunks of the row.

A chunk's sum is taken below its own largest value and scaled down when a larger one turns up, so a row of any width
needs one look before it is written. Rows that fit in registers are read once in all. Of wider rows every program
reduces one chunk and then writes one that was reduced some thousand programs ago, while the L2 still holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.softmax import online_softmax as cost
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.rows import (
    MAX_COLS,
    collect,
    copies_of,
    forget,
    publish,
    random_rows,
    row_shapes,
    rows_of,
    sum_of,
    sums_of,
    why_torch,
)
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered
from sublight.ops.record.tuning import Tile, tile_for
from sublight.ops.softmax.plans import in_python, tile_of, trailing_units
from sublight.ops.softmax.softmax import LOG2_E, exp_below, log_of, share_of


def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()  # the sum is fp32 whatever x is
    return torch.softmax(x, -1), torch.logsumexp(wide, -1)


@triton.jit
def log_sum(top, total):
    """Of a row whose largest value is infinite, that value, as torch.logsumexp has it."""
    return tl.where((top == float("inf")) | (top == -float("inf")), top, top + log_of(total))


@triton.jit
def _held_kernel(
    x_ptr, y_ptr, lse_ptr, rows, cols, x_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=-float("inf"))
    top = tl.max(x.to(tl.float32), 1)[:, None]
    x = forget(x, top, PACKED)
    total = sum_of(exp_below(x, top, EXACT=True), 1, SUMS)[:, None]
    x = forget(x, total, PACKED)
    tl.store(lse_ptr + row, log_sum(top, total), mask=row < rows)
    y = share_of(exp_below(x, top), total, x.dtype)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _chunks_kernel(
    x_ptr, y_ptr, lse_ptr, part_ptr, cols, x_stride, units, lag, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)  # the chunk that this program reduces …
    second = first - lag  # … and the one that it writes
    row, part = (first // parts).to(tl.int64), first % parts
    col = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + col, mask=col < tl.where(first < units, cols, 0), other=-float("inf"))
    old_unit = tl.maximum(second, 0)
    row, part = (old_unit // parts).to(tl.int64), old_unit % parts
    col = part * BLOCK + tl.arange(0, BLOCK)
    inside = col < tl.where(second >= 0, cols, 0)
    old = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0, eviction_policy="evict_first")
    top = tl.max(x.to(tl.float32), 0)
    base = tl.where(top == -float("inf"), 0.0, top)  # a masked chunk adds nothing
    publish(part_ptr + first, top, sum_of(exp_below(x, base, EXACT=True), 0, SUMS), first < units)
    if second >= 0:
        tops, totals = collect(part_ptr + row * parts, parts, PARTS)
        top = tl.max(tops, 0)
        total = sum_of(totals * exp_below(tops, top), 0, SUMS)
        tl.store(lse_ptr + row, log_sum(top, total), mask=part == 0)
        y = share_of(exp_below(old, top), total, old.dtype).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * cols + col, y, mask=inside, cache_modifier=".cs")


@triton.jit
def _probability(kept, lse):
    """Out of what the forward pass has kept: y itself in fp32; x otherwise, so that y's rounding is in no gradient."""
    if kept.dtype == tl.float32:
        return kept
    else:
        return tl.exp2((kept.to(tl.float32) - lse) * LOG2_E)


@triton.jit
def _held_backward_kernel(
    dy_ptr, dlse_ptr, kept_ptr, lse_ptr, dx_ptr, rows, cols, dy_stride, kept_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    kept = tl.load(kept_ptr + row * kept_stride + col, mask=mask, other=NOTHING)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
    dlse = tl.load(dlse_ptr + row, mask=row < rows, other=0.0)
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0)
    dot = sum_of(_probability(kept, lse) * dy.to(tl.float32), 1, SUMS)[:, None]
    kept, dy = forget(kept, dot, PACKED), forget(dy, dot, PACKED)
    dx = _probability(kept, lse) * ((dy.to(tl.float32) - dot) + dlse)
    tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _chunks_backward_kernel(
    dy_ptr, dlse_ptr, kept_ptr, lse_ptr, dx_ptr, part_ptr, cols, dy_stride, kept_stride, units, lag, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SUMS: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    second = first - lag
    row, part = (first // parts).to(tl.int64), first % parts
    col = part * BLOCK + tl.arange(0, BLOCK)
    mask = col < tl.where(first < units, cols, 0)
    kept = tl.load(kept_ptr + row * kept_stride + col, mask=mask, other=NOTHING)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
    lse = tl.load(lse_ptr + row, mask=first < units, other=0.0)
    dot = sum_of(_probability(kept, lse) * dy.to(tl.float32), 0, SUMS)
    publish(part_ptr + first, dot, tl.full([], 1.0, tl.float32), first < units)  # the 1.0 says that it is there
    if second >= 0:
        row, part = (second // parts).to(tl.int64), second % parts
        col = part * BLOCK + tl.arange(0, BLOCK)
        mask = col < cols
        kept = tl.load(kept_ptr + row * kept_stride + col, mask=mask, other=NOTHING, eviction_policy="evict_first")
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0, eviction_policy="evict_first")
        dlse = tl.load(dlse_ptr + row)
        dots, there = collect(part_ptr + row * parts, parts, PARTS)
        dot = sum_of(tl.where(there > 0, dots, 0.0), 0, SUMS)
        dx = _probability(kept, tl.load(lse_ptr + row)) * ((dy.to(tl.float32) - dot) + dlse)
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols, cache_modifier=".cs")


def plan_forward(x: torch.Tensor) -> Plan:
    """Rows that fit in registers, or chunks of rows that do not."""
    layout = rows_of(x)
    rows, cols, item, sums, capability = layout.rows, layout.cols, layout.itemsize, sums_of(x), facts(x).capability
    buffers = {
        "y": Buffer(shape=tuple(x.shape), dtype=x.dtype),
        "lse": Buffer(shape=tuple(x.shape[:-1]), dtype=torch.float32),
    }
    held = tile_of("softmax", cols, item, packed=layout.is_packed, capability=capability)
    if held is not None:
        reason = f"{cols} columns: rows in registers"
        step = Step(
            _held_kernel, (cdiv(rows, held.rows),), rows, cols, layout.apart,
            on="x y lse", tile=held,
            ROWS=held.rows, BLOCK=held.block, PACKED=held.packed, SUMS=sums, **held.options(),
        )  # fmt: skip
    else:
        reason = f"{cols} columns: chunks, second look from the L2"
        # few columns a program, so that many are on their way; more in wide rows, whose chunks every program merges
        rule = Tile(block=4096, warps=4)
        if cols > 32 * 4096:
            rule = Tile(block=8192, warps=8, registers=80 if item == 2 else None)
        tile = tile_for("online_softmax", cols, item, packable=True, capability=capability, rule=rule)
        parts = cdiv(cols, tile.block)
        units, lag = trailing_units(rows, parts, tile.block * item)
        buffers["part"] = Buffer(shape=(units,), dtype=torch.int64, is_zero=True)
        step = Step(
            _chunks_kernel, (units + lag,), cols, layout.apart, units, lag, parts,
            on="x y lse part", tile=tile,
            BLOCK=tile.block, PARTS=next_power_of_2(parts), SUMS=sums, **tile.options(),
        )  # fmt: skip
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(x=layout.is_copy),
        buffers=buffers,
        steps=(step,),
        outputs=("y", "lse"),
    )


def plan_backward(dy: torch.Tensor, dlse: torch.Tensor | None, kept: torch.Tensor, lse: torch.Tensor) -> Plan:
    """dx = y * (dy - sum(y * dy) + dlse); `kept` is y in fp32, x otherwise; no `dlse` where nobody used the log."""
    grads, layout = rows_of(dy), rows_of(kept)
    rows, cols, sums, capability = layout.rows, layout.cols, sums_of(kept), facts(kept).capability
    item, packed = 2 * layout.itemsize, grads.is_packed and layout.is_packed  # two tensors share the registers
    nothing = 0.0 if kept.dtype == torch.float32 else -float("inf")  # adds nothing to a sum
    buffers = {"dx": Buffer(shape=tuple(kept.shape), dtype=kept.dtype)}
    if dlse is None:
        buffers["no_dlse"] = Buffer(shape=(rows,), dtype=torch.float32, is_zero=True)
    on = f"dy {'no_dlse' if dlse is None else 'dlse'} kept lse dx"
    strides = (grads.apart, layout.apart)
    held = tile_of("softmax_backward", cols, item, packed=packed, capability=capability)
    if held is not None:
        reason = f"{cols} columns: rows in registers"
        step = Step(
            _held_backward_kernel, (cdiv(rows, held.rows),), rows, cols, *strides,
            on=on, tile=held,
            ROWS=held.rows, BLOCK=held.block, PACKED=held.packed, SUMS=sums, NOTHING=nothing, **held.options(),
        )  # fmt: skip
    else:
        reason = f"{cols} columns: chunks, second look from the L2"
        registers = 128 if capability == 80 else None  # left alone, the assembler stops at 80 there and spills
        rule = Tile(block=8192, warps=8, registers=registers)
        tile = tile_for("online_softmax_backward", cols, item, packable=True, capability=capability, rule=rule)
        parts = cdiv(cols, tile.block)
        units, lag = trailing_units(rows, parts, tile.block * item)
        buffers["part"] = Buffer(shape=(units,), dtype=torch.int64, is_zero=True)
        step = Step(
            _chunks_backward_kernel, (units + lag,), cols, *strides, units, lag, parts,
            on=f"{on} part", tile=tile,
            BLOCK=tile.block, PARTS=next_power_of_2(parts), SUMS=sums, NOTHING=nothing, **tile.options(),
        )  # fmt: skip
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(
            dy=grads.is_copy,
            dlse=dlse is not None and not dlse.is_contiguous(),
            kept=layout.is_copy,
            lse=not lse.is_contiguous(),
        ),
        buffers=buffers,
        steps=(step,),
        outputs=("dx",),
    )


def _gradient(dy: torch.Tensor, dlse: torch.Tensor | None, kept: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The backward pass in PyTorch's ops; where x was kept, y is worked out again."""
    y = kept if kept.element_size() > 2 else torch.softmax(kept, -1, dtype=torch.float32)
    along = dy.to(y.dtype) - (y * dy).sum(-1, keepdim=True)
    return (y * (along if dlse is None else along + dlse.unsqueeze(-1))).to(kept.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OneIsKept(Gradient):
    """Keeps y of fp32 rows and x of 16-bit ones, so Python looks at each. Most callers use one of the two results."""

    def set_up(self, ctx: Any, op: Any, inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        (x,), (y, lse) = inputs, outputs
        ctx.save_for_backward(x if x.element_size() == 2 else y, lse)
        ctx.others = {}
        ctx.set_materialize_grads(False)

    def backward(self, ctx: Any, op: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        dy, dlse = grads
        if dy is None and dlse is not None:
            dy = torch.zeros_like(ctx.saved_tensors[0])
        return Gradient.backward(self, ctx, op, (dy, dlse))


_online_softmax_backward = Registered(
    schema="online_softmax_backward(Tensor dy, Tensor? dlse, Tensor kept, Tensor lse) -> Tensor dx",
    reference=_gradient,
    plan=plan_backward,
    fake=lambda dy, dlse, kept, lse: torch.empty_like(kept, memory_format=torch.contiguous_format),
)
_online_softmax = Registered(
    schema="online_softmax(Tensor x) -> (Tensor y, Tensor lse)",
    reference=reference,
    theirs="torch.softmax, torch.logsumexp",
    why_torch=lambda x: why_torch(x[..., :1] if x.dim() and x.shape[-1] > MAX_COLS else x),  # no row is too wide here
    plan=plan_forward,
    fake=lambda x: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    ),
    gradient=_OneIsKept(
        by=in_python(_online_softmax_backward.call),
        saves=("kept", "lse"),
        gives=("x",),
        by_torch=lambda saved, grads: (_gradient(grads[0], grads[1], saved["kept"], saved["lse"]),),
    ),
)


def online_softmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension, and the log of the sum of its exponentials in fp32."""
    return _online_softmax.call(x)  # type: ignore[no-any-return]


def plan(x: torch.Tensor) -> Plan:
    """What `online_softmax(x)` runs, and why."""
    return _online_softmax.decide(x)


def launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Our forward kernels, whether or not they win."""
    return _online_softmax.by_kernels(x)  # type: ignore[no-any-return]


def launch_backward(dy: torch.Tensor, dlse: torch.Tensor, x: torch.Tensor) -> Inputs:
    """Our backward kernels, on what the forward kernels give."""
    y, lse = launch(x)
    return (_online_softmax_backward.by_kernels(dy, dlse, x if x.element_size() == 2 else y, lse),)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (random_rows(shape, dtype, device, seed, scale=3.0),)


WIDTHS = (1600, 4096, 8192, 12288, 32768, 65536, 131072, 151936)
ONLINE_SOFTMAX = Op(
    name="online_softmax",
    summary="softmax and the log of its sum, in one pass over chunks",
    reference=reference,
    call=online_softmax,
    plan=plan,
    providers={
        "sublight": Provider(
            launch=launch,
            backward=launch_backward,
            kernels=(
                Kernel(jit=_held_kernel, spills="8 bytes a thread at 32,768 columns on a B200"),
                Kernel(jit=_chunks_kernel),
                Kernel(jit=_held_backward_kernel),
                Kernel(jit=_chunks_backward_kernel),
            ),
        )
    },
    inputs=inputs,
    cost=cost,
    shapes=(
        *row_shapes(WIDTHS)[: len(WIDTHS)],
        *({"rows": rows, "cols": 2**20} for rows in (128, 1)),
        *({"rows": rows, "cols": 4096} for rows in (1, 16, 128)),
    ),
    test_shapes=tuple(
        {"rows": rows, "cols": cols}
        for rows, cols in ((1, 1), (3, 127), (65, 128), (5, 2049), (2, 16384), (1, 70001), (3, 40000))
    ),
)
