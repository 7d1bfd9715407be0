"""Softmax and the log of its sum; largest value and sum are found together, in one pass over chunks of the row.

A chunk's sum is taken below its own largest value and scaled down when a larger one turns up, so a row of any width
needs one look before it is written. Rows that fit in registers are read once in all. Of wider rows every program
reduces one chunk and then writes one that was reduced some thousand programs ago, while the L2 still holds it.
"""

from __future__ import annotations

from typing import Any

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.softmax import online_softmax as cost
from sublight.op import Choice, Kernel, Op
from sublight.ops.kernels.rows import (
    MAX_COLS,
    as_rows,
    collect,
    forget,
    is_packed,
    publish,
    random_rows,
    row_shapes,
    sum_of,
    sums_of,
    why_torch,
)
from sublight.ops.record.library import LIBRARY
from sublight.ops.record.tuning import Tile, tile_for
from sublight.ops.softmax.launch import plan, trailing_units
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


def launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Our forward kernels, whatever `choose` would say."""
    x2 = as_rows(x)
    rows, cols = x2.shape
    y = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    lse = torch.empty(rows, dtype=torch.float32, device=x.device)
    item, sums, capability = x.element_size(), sums_of(x), facts(x).capability
    held = plan("softmax", cols, item, packed=is_packed(x2), capability=capability)
    if held is not None:
        _held_kernel[(cdiv(rows, held.rows),)](
            x2, y, lse, rows, cols, x2.stride(0),
            ROWS=held.rows, BLOCK=held.block, PACKED=held.packed, SUMS=sums, **held.options(),
        )  # fmt: skip
    else:
        # few columns a program, so that many are on their way; more in wide rows, whose chunks every program merges
        rule = Tile(block=4096, warps=4)
        if cols > 32 * 4096:
            rule = Tile(block=8192, warps=8, registers=80 if item == 2 else None)
        tile = tile_for("online_softmax", cols, item, packable=True, capability=capability, rule=rule)
        parts = cdiv(cols, tile.block)
        units, lag = trailing_units(rows, parts, tile.block * item)
        part = torch.zeros(units, dtype=torch.int64, device=x.device)
        _chunks_kernel[(units + lag,)](
            x2, y, lse, part, cols, x2.stride(0), units, lag, parts,
            BLOCK=tile.block, PARTS=next_power_of_2(parts), SUMS=sums, **tile.options(),
        )  # fmt: skip
    return y.view(x.shape), lse.view(x.shape[:-1])


def launch_backward(dy: torch.Tensor, dlse: torch.Tensor, kept: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Our backward kernels: dx = y * (dy - sum(y * dy) + dlse); `kept` is y in fp32, x otherwise."""
    dy2, kept2 = as_rows(dy), as_rows(kept)
    rows, cols = kept2.shape
    dlse, lse = dlse.reshape(-1).contiguous(), lse.reshape(-1).contiguous()
    nothing = 0.0 if kept.dtype == torch.float32 else -float("inf")  # adds nothing to a sum
    dx = torch.empty((rows, cols), dtype=kept.dtype, device=kept.device)
    item = 2 * kept.element_size()  # two tensors share the registers
    sums, capability = sums_of(kept), facts(kept).capability
    held = plan("softmax_backward", cols, item, packed=is_packed(dy2, kept2), capability=capability)
    if held is not None:
        _held_backward_kernel[(cdiv(rows, held.rows),)](
            dy2, dlse, kept2, lse, dx, rows, cols, dy2.stride(0), kept2.stride(0),
            ROWS=held.rows, BLOCK=held.block, PACKED=held.packed, SUMS=sums, NOTHING=nothing, **held.options(),
        )  # fmt: skip
    else:
        registers = 128 if capability == 80 else None  # left alone, the assembler stops at 80 there and spills
        rule = Tile(block=8192, warps=8, registers=registers)
        tile = tile_for("online_softmax_backward", cols, item, packable=True, capability=capability, rule=rule)
        parts = cdiv(cols, tile.block)
        units, lag = trailing_units(rows, parts, tile.block * item)
        part = torch.zeros(units, dtype=torch.int64, device=kept.device)
        _chunks_backward_kernel[(units + lag,)](
            dy2, dlse, kept2, lse, dx, part, cols, dy2.stride(0), kept2.stride(0), units, lag, parts,
            BLOCK=tile.block, PARTS=next_power_of_2(parts), SUMS=sums, NOTHING=nothing, **tile.options(),
        )  # fmt: skip
    return dx.view(kept.shape)


def _why_torch(x: torch.Tensor) -> str:
    return why_torch(x[..., :1] if x.dim() and x.shape[-1] > MAX_COLS else x)  # no row is too wide here


def choose(x: torch.Tensor) -> Choice:
    """What `online_softmax(x)` runs, and why."""
    if reason := _why_torch(x):
        return Choice(provider="torch", kernel="torch.softmax, torch.logsumexp", reason=reason)
    cols, item = x.shape[-1], x.element_size()
    if plan("softmax", cols, item, packed=item == 2) is not None:
        return Choice(provider="sublight", kernel="_held_kernel", reason=f"{cols} columns: rows in registers")
    reason = f"{cols} columns: chunks, second look from the L2"
    return Choice(provider="sublight", kernel="_chunks_kernel", reason=reason)


def online_softmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension, and the log of the sum of its exponentials in fp32."""
    if _why_torch(x):
        return reference(x)
    y, lse = _online_softmax(x)
    return y, lse


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(inputs[0] if output[0].element_size() == 2 else output[0], output[1])
    ctx.set_materialize_grads(False)  # most callers use one of the two


def _backward(ctx: Any, dy: torch.Tensor | None, dlse: torch.Tensor | None) -> torch.Tensor | None:
    kept, lse = ctx.saved_tensors
    if dy is None and dlse is None:
        return None
    dy = torch.zeros_like(kept) if dy is None else dy
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    return _online_softmax_backward(dy, dlse, kept, lse)  # type: ignore[no-any-return]


def _cpu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, lse = reference(x)
    return y.contiguous(), lse.to(torch.float32).contiguous()


def _cpu_backward(dy: torch.Tensor, dlse: torch.Tensor, kept: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(kept, -1) if kept.element_size() == 2 else kept
    dx = torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype).float() + y.float() * dlse[..., None]
    return dx.to(y.dtype).contiguous()  # type: ignore[no-any-return]


_online_softmax = LIBRARY.op(
    "online_softmax(Tensor x) -> (Tensor, Tensor)",
    cpu=_cpu,
    cuda=launch,
    fake=lambda x: (torch.empty_like(x, memory_format=torch.contiguous_format),
                    x.new_empty(x.shape[:-1], dtype=torch.float32)),
    backward=_backward,
    setup_context=_setup_context,
)  # fmt: skip
_online_softmax_backward = LIBRARY.op(
    "online_softmax_backward(Tensor dy, Tensor dlse, Tensor kept, Tensor lse) -> Tensor",
    cpu=_cpu_backward,
    cuda=launch_backward,
    fake=lambda dy, dlse, kept, lse: torch.empty_like(kept, memory_format=torch.contiguous_format),
)


def _launch_backward(dy: torch.Tensor, dlse: torch.Tensor, x: torch.Tensor) -> Inputs:
    y, lse = launch(x)
    return (launch_backward(dy, dlse, x if x.element_size() == 2 else y, lse),)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (random_rows(shape, dtype, device, seed, scale=3.0),)


WIDTHS = (1600, 4096, 8192, 12288, 32768, 65536, 131072, 151936)
ONLINE_SOFTMAX = Op(
    name="online_softmax",
    summary="softmax and the log of its sum, in one pass over chunks",
    reference=reference,
    call=online_softmax,
    launch=launch,
    launch_backward=_launch_backward,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=(
        Kernel(jit=_held_kernel, spills="8 bytes a thread at 32,768 columns on a B200"),
        Kernel(jit=_chunks_kernel),
        Kernel(jit=_held_backward_kernel),
        Kernel(jit=_chunks_backward_kernel),
    ),
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
