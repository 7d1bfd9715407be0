"""The backward pass of layer_norm and rms_norm: read x and dy, write dx, and add up the weight's gradient on the way.

One program on each multiprocessor, or a few, is busy with many rows: it adds up its share of the weight's gradient in
a fixed order, so the result is the same every time; a second launch adds the shares.
"""

from __future__ import annotations

import torch

from sublight.backend.jit import cdiv, tl, triton
from sublight.op import Kernel
from sublight.ops.kernels.rows import (
    ODD_WIDTHS,
    Facts,
    aligned_as,
    as_rows,
    block_for,
    facts,
    forget,
    is_interpreted,
    is_packed,
)
from sublight.ops.norm import row_norm_ring
from sublight.ops.record.tuning import Tile, planned, tile_for

STREAM_BLOCK = 8192
BACKWARD_BYTES = 32 * 1024  # of x; with dy, the weight and the fp32 sums this is what the registers hold
SHARES = 32  # of the weight's gradient that one step of the second launch adds


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows, cols, dy_stride, x_stride,
    CENTER: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < cols
    w = tl.load(w_ptr + aligned_as(cols) + col, mask=mask, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for index in tl.range(share, rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.full([], 0, tl.int64) + index  # rows * cols may pass 2**31
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if CENTER:
            mean = tl.load(mean_ptr + row)
        g = dy.to(tl.float32) * w.to(tl.float32)
        along = tl.sum(g * (x.to(tl.float32) - mean), 0) * rstd / cols  # of the gradient, along the normalised row
        offset = 0.0
        if CENTER:
            offset = tl.sum(g, 0) / cols
        x, dy = forget(x, along, PACKED), forget(dy, along, PACKED)
        normal = (x.to(tl.float32) - mean) * rstd
        dw += dy.to(tl.float32) * normal
        if CENTER:
            db += dy.to(tl.float32)
        dx = (dy.to(tl.float32) * forget(w, along, PACKED).to(tl.float32) - normal * along - offset) * rstd
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + share.to(tl.int64) * cols + col, dw, mask=mask)
    if CENTER:
        tl.store(db_ptr + share.to(tl.int64) * cols + col, db, mask=mask)


@triton.jit
def _stream_backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, cols, dy_stride, x_stride,
    CENTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if CENTER:
        mean = tl.load(mean_ptr + row)
    along = tl.zeros([BLOCK], tl.float32)
    offset = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_last")
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0, eviction_policy="evict_last")
        w = tl.load(w_ptr + aligned_as(cols) + col, mask=col < cols, other=0.0)
        g = dy.to(tl.float32) * w.to(tl.float32)
        along += g * (x.to(tl.float32) - mean)
        offset += g
    along_row = tl.sum(along, 0) * rstd / cols
    offset_row = 0.0
    if CENTER:
        offset_row = tl.sum(offset, 0) / cols
    for start in tl.range(0, cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + col, mask=col < cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=col < cols, other=0.0).to(tl.float32)
        g = dy * tl.load(w_ptr + aligned_as(cols) + col, mask=col < cols, other=0.0).to(tl.float32)
        dx = (g - (x - mean) * rstd * along_row - offset_row) * rstd
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=col < cols)


@triton.jit
def _columns_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, rows, cols, dy_stride, x_stride, rows_each,
    CENTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Shares of the weight's gradient where rows are too wide to be held: a block of columns over a run of rows."""
    share = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    last = tl.minimum(rows, (share + 1) * rows_each)
    for start in tl.range(share * rows_each, last, ROWS):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        mask = (row < last) & (col < cols)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < last, other=0.0)
        if CENTER:
            x -= tl.load(mean_ptr + row, mask=row < last, other=0.0)
            db += dy
        dw += dy * x * rstd
    place = share.to(tl.int64) * cols + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) < cols
    tl.store(dw_ptr + place, tl.sum(dw, 0), mask=inside)
    if CENTER:
        tl.store(db_ptr + place, tl.sum(db, 0), mask=inside)


@triton.jit
def _shares_kernel(
    dw_ptr, db_ptr, out_dw_ptr, out_db_ptr, shares, cols,
    CENTER: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([SHARES, BLOCK], tl.float32)
    db = tl.zeros([SHARES, BLOCK], tl.float32)
    for start in tl.range(0, shares, SHARES):
        share = start + tl.arange(0, SHARES)[:, None]
        mask = (share < shares) & (col < cols)[None, :]
        dw += tl.load(dw_ptr + share * cols + col[None, :], mask=mask, other=0.0)
        if CENTER:
            db += tl.load(db_ptr + share * cols + col[None, :], mask=mask, other=0.0)
    tl.store(out_dw_ptr + col, tl.sum(dw, 0).to(out_dw_ptr.dtype.element_ty), mask=col < cols)
    if CENTER:
        tl.store(out_db_ptr + col, tl.sum(db, 0).to(out_db_ptr.dtype.element_ty), mask=col < cols)


KERNELS = (
    Kernel(
        jit=_backward_kernel,
        spills="from 8,192 columns on x, dy, the weight and two fp32 sums overflow the registers; on an H200 that took "
        "356 µs (layer_norm, 8192x16384), the kernels that read the rows twice 423 µs (4096x32768)",
    ),
    row_norm_ring.KERNEL,
    Kernel(jit=_stream_backward_kernel, narrow=ODD_WIDTHS),
    Kernel(jit=_columns_kernel, narrow=ODD_WIDTHS),
    Kernel(jit=_shares_kernel),
)


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, of the weight, and of the bias (empty where `mean` is: RMSNorm has none)."""
    dy2, x2 = as_rows(dy), as_rows(x)
    rows, cols = x2.shape
    center = mean.numel() > 0
    dx = torch.empty((rows, cols), dtype=x.dtype, device=x.device)
    dw = torch.empty(cols, dtype=weight.dtype, device=x.device)
    db = torch.empty(cols if center else 0, dtype=weight.dtype, device=x.device)
    weight = weight.contiguous()
    gpu, packed = facts(x), is_packed(dy2, x2)
    tile = plan_backward(center, cols, x.element_size(), gpu, packed=packed)
    if tile is not None and tile.parts:
        dw_shares, db_shares = row_norm_ring.launch(dy2, x2, weight, mean, rstd, dx, tile, gpu.multiprocessors)
        shares = dw_shares.shape[0]
    elif tile is not None:
        shares = min(rows, tile.programs * gpu.multiprocessors)
        dw_shares, db_shares = _shares(shares, cols, center, x.device)
        _backward_kernel[(shares,)](
            dy2, x2, weight, mean, rstd, dx, dw_shares, db_shares, rows, cols, dy2.stride(0), x2.stride(0),
            CENTER=center, BLOCK=tile.block, STAGES=tile.stages, PACKED=tile.packed and packed, **tile.options(),
        )  # fmt: skip
    else:
        _stream_backward_kernel[(rows,)](
            dy2, x2, weight, mean, rstd, dx, cols, dy2.stride(0), x2.stride(0),
            CENTER=center, BLOCK=STREAM_BLOCK, num_warps=16,
        )  # fmt: skip
        columns = cdiv(cols, 128)
        shares = max(1, min(cdiv(rows, 32), cdiv(8 * gpu.multiprocessors, columns)))
        rows_each = cdiv(rows, shares)
        dw_shares, db_shares = _shares(shares, cols, center, x.device)
        _columns_kernel[(columns, shares)](
            dy2, x2, mean, rstd, dw_shares, db_shares, rows, cols, dy2.stride(0), x2.stride(0), rows_each,
            CENTER=center, ROWS=16, BLOCK=128, num_warps=8,
        )  # fmt: skip
    width = 32 if cols <= 16384 else 128  # narrow rows need many programs to fill the GPU, wide ones have them
    _shares_kernel[(cdiv(cols, width),)](
        dw_shares, db_shares, dw, db, shares, cols, CENTER=center, SHARES=SHARES, BLOCK=width, num_warps=4
    )
    return dx.view(x.shape), dw, db


def fake_backward(x: torch.Tensor, weight: torch.Tensor, *, center: bool) -> tuple[torch.Tensor, ...]:
    """The shapes that `backward` gives."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    return dx, dw, torch.empty_like(dw) if center else weight.new_empty(0)


def _shares(shares: int, cols: int, center: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    dw = torch.empty((shares, cols), dtype=torch.float32, device=device)
    return dw, torch.empty_like(dw) if center else dw


@planned
def plan_backward(center: bool, cols: int, itemsize: int, gpu: Facts, *, packed: bool) -> Tile | None:
    """For programs that take many rows each: how many, with what, and how many rows are on their way."""
    block = block_for(cols)
    if is_interpreted():
        return Tile(block=block, warps=4, programs=1) if block * itemsize <= BACKWARD_BYTES else None
    fits = 2 * 2 * block * itemsize + 1024 <= gpu.shared_bytes  # two rows ahead, of x and of dy
    rule: Tile | None
    if block * itemsize > BACKWARD_BYTES:  # shared out over programs, 8,192 columns each, where that was tried
        parts = block // 8192
        ring = packed and gpu.capability == 90
        rule = Tile(block=block, warps=8, registers=128, programs=2, stages=3, parts=parts) if ring else None
    elif block <= 1024:
        rule = Tile(block=block, warps=4, registers=128, packed=True, programs=4, stages=4)
    elif block <= 4096:
        rule = Tile(block=block, warps=8, registers=128, packed=True, programs=2, stages=3)
    elif itemsize == 4:
        rule = Tile(block=block, warps=32, registers=64, programs=1, stages=3 if fits else 2)
    else:
        rule = Tile(block=block, warps=16, registers=128, packed=True, programs=1, stages=3 if fits else 2)
    name = "layer_norm_backward" if center else "rms_norm_backward"
    return tile_for(name, cols, itemsize, packable=packed, capability=gpu.capability, rule=rule)
