"""The kernels behind add_rms_norm and add_layer_norm: the residual stream's sum and its norm in one pass over the rows.

Forward: read x and the residual, write their sum, rounded once as PyTorch's own sum is, and the norm of that rounded
sum. Backward: read the two incoming gradients and the sum, write one gradient, which is that of both inputs. As in
`rms_norm.py`, programs of the backward pass take many rows and add up shares of the weight's gradient in a fixed order;
where rows are narrow they take several at once, so that a reduction's barriers are paid once for all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.cost import Shape
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Plan
from sublight.ops.kernels.column_sums import shares_for
from sublight.ops.kernels.rows import (
    ELEMENTS,
    SMALL_ROWS,
    aligned_as,
    copies_of,
    forget,
    rows_of,
    sum_of,
    sums_of,
    why_torch,
)
from sublight.ops.norm import add_norm_wide, narrow, ring, rms_norm
from sublight.ops.norm.add_norm_tiles import tile_of, tile_of_backward
from sublight.ops.norm.parts import check_width, load_columns, reciprocal_root
from sublight.ops.norm.rms_norm import add_shares, shares_of
from sublight.ops.norm.tiles import FEW_ROWS

WIDTHS = (768, 1600, 2560, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
SHAPES: tuple[Shape, ...] = (
    *({"rows": ELEMENTS // cols, "cols": cols} for cols in WIDTHS),
    *({"rows": rows, "cols": 4096} for rows in SMALL_ROWS),
)
GROUP_ROWS, GROUP_COLS = 8, 1024  # what a program that adds up columns takes of a group of wide rows at once


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, rows, cols, x_stride, residual_stride, eps,
    CENTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # rows * cols may pass 2**31
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0)
    if EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
    h = x + residual
    tl.store(sum_ptr + row * cols + col, h, mask=mask)
    mean = 0.0
    if CENTER:
        mean = tl.div_rn(sum_of(h.to(tl.float32), 1, SUMS), cols * 1.0)[:, None]
        tl.store(mean_ptr + row, mean, mask=row < rows)
        h = forget(h, mean, PACKED)
    centred = tl.where(mask, h.to(tl.float32) - mean, 0.0)
    rstd = reciprocal_root(sum_of(centred * centred, 1, SUMS)[:, None], cols, eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    h = forget(h, rstd, PACKED)
    if not EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
    y = (h.to(tl.float32) - mean) * rstd * w.to(tl.float32)
    if CENTER:
        y += b.to(tl.float32)
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _chunks_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr, cols, x_stride, residual_stride, eps,
    CENTER: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """For rows that no multiprocessor holds: the sum is written in a first pass, and read again out of the L2."""
    row = tl.program_id(0).to(tl.int64)
    mean, squares, count = 0.0, 0.0, 0.0
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0, eviction_policy="evict_first")
        residual = tl.load(
            residual_ptr + row * residual_stride + col, mask=mask, other=0.0, eviction_policy="evict_first"
        )
        h = x + residual
        tl.store(sum_ptr + row * cols + col, h, mask=mask)
        h32 = h.to(tl.float32)
        size = tl.minimum(cols - start, BLOCK).to(tl.float32)
        if CENTER:  # chunks merge by their means and squared deviations, so that a large mean costs no digits
            chunk_mean = tl.div_rn(sum_of(h32, 0, SUMS), size)
            deviation = tl.where(mask, h32 - chunk_mean, 0.0)
            shift = chunk_mean - mean
            squares += sum_of(deviation * deviation, 0, SUMS) + shift * shift * count * size / (count + size)
            mean += shift * size / (count + size)
            count += size
        else:
            squares += sum_of(h32 * h32, 0, SUMS)
    rstd = reciprocal_root(squares, cols, eps)
    if CENTER:
        tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    tl.debug_barrier()  # a thread may read what another has written
    for start in tl.range(0, cols, BLOCK, num_stages=STAGES):
        col = start + tl.arange(0, BLOCK)
        mask = col < cols
        h = tl.load(sum_ptr + row * cols + col, mask=mask, other=0.0)
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
        y = (h.to(tl.float32) - mean) * rstd * w.to(tl.float32)
        if CENTER:
            y += b.to(tl.float32)
        tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, dsum_ptr, sum_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows, cols, dy_stride, dsum_stride,
    CENTER: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    col = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + aligned_as(cols) + col, mask=col < cols, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(share * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)  # rows * cols may pass 2**31
        mask = (row < rows) & (col < cols)
        h = tl.load(sum_ptr + row * cols + col, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        mean = 0.0
        if CENTER:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        g = dy.to(tl.float32) * forget(w, rstd, PACKED).to(tl.float32)
        along = sum_of(g * (h.to(tl.float32) - mean), 1, SUMS)[:, None] * rstd / cols  # the gradient along the row
        offset = 0.0
        if CENTER:
            offset = sum_of(g, 1, SUMS)[:, None] / cols
        h, dy = forget(h, along, PACKED), forget(dy, along, PACKED)
        normal = (h.to(tl.float32) - mean) * rstd
        dw += tl.sum(dy.to(tl.float32) * normal, 0)
        if CENTER:
            db += tl.sum(dy.to(tl.float32), 0)
        g = dy.to(tl.float32) * forget(w, along, PACKED).to(tl.float32)
        dx = (g - normal * along - offset) * rstd
        if RESIDUAL:
            dx += tl.load(dsum_ptr + row * dsum_stride + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * cols + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    place = tl.arange(0, BLOCK)
    tl.store(dw_ptr + share.to(tl.int64) * cols + place, dw.to(dw_ptr.dtype.element_ty), mask=place < cols)
    if CENTER:
        tl.store(db_ptr + share.to(tl.int64) * cols + place, db.to(db_ptr.dtype.element_ty), mask=place < cols)


KERNELS = (
    Kernel(jit=_forward_kernel),
    Kernel(jit=_chunks_kernel),
    Kernel(
        jit=_backward_kernel,
        spills="at 16,384 columns two gradients, the sum, the weight and fp32 sums overflow the registers: RMSNorm by "
        "40 bytes a thread on an H200, by 88 elsewhere, LayerNorm by up to 352; else chunks would be read twice",
    ),
    Kernel(jit=add_norm_wide._wide_backward_kernel),
    narrow.BACKWARD_KERNEL,
    ring.KERNEL,
    rms_norm.SHARES_KERNEL,
)


def plan_forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
) -> Plan:
    """Which kernel adds and normalises these rows, and how."""
    layout, other, gpu = rows_of(x), rows_of(residual), facts(x)
    rows, cols, center = layout.rows, layout.cols, bias is not None
    few, packed = rows <= FEW_ROWS * gpu.multiprocessors, layout.is_packed and other.is_packed
    name = "add_layer_norm" if center else "add_rms_norm"
    tile = tile_of(name, cols, layout.itemsize, packed=packed, capability=gpu.capability, few=few)
    numbers = (cols, layout.apart, other.apart, eps)
    constants = {"CENTER": center, "BLOCK": tile.block, "SUMS": sums_of(x), **tile.options()}
    on = f"x residual weight {'bias y new_residual mean' if center else 'weight y new_residual rstd'} rstd"
    if tile.block < cols:
        reason = f"{cols} columns: in chunks, twice"
        step = Step(_chunks_kernel, (rows,), *numbers, on=on, tile=tile, STAGES=tile.stages, **constants)
    else:
        reason = f"{cols} columns: rows in registers"
        constants |= {"ROWS": tile.rows, "PACKED": tile.packed and packed, "EARLY": few}
        step = Step(_forward_kernel, (cdiv(rows, tile.rows),), rows, *numbers, on=on, tile=tile, **constants)
    outputs = dict.fromkeys(("y", "new_residual"), Buffer(shape=tuple(x.shape), dtype=x.dtype))
    outputs |= dict.fromkeys(("mean", "rstd") if center else ("rstd",), Buffer(shape=(rows,), dtype=torch.float32))
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(
            x=layout.is_copy,
            residual=other.is_copy,
            weight=not weight.is_contiguous(),
            bias=bias is not None and not bias.is_contiguous(),
        ),
        buffers=outputs,
        steps=(step,),
        outputs=tuple(outputs),
    )


def plan_backward(
    dy: torch.Tensor,
    d_new_residual: torch.Tensor | None,
    new_residual: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
) -> Plan:
    """The launch that gives dx, the gradient of x and of the residual, and shares of the weight's gradient; then the
    one that adds the shares up. `d_new_residual` is None where nobody has used the new residual."""
    grads, layout, gpu = rows_of(dy), rows_of(new_residual), facts(new_residual)
    sums = grads if d_new_residual is None else rows_of(d_new_residual)
    dsum, residual = ("dy", "new_residual") if d_new_residual is None else ("d_new_residual", "d_new_residual")
    rows, cols, center = layout.rows, layout.cols, mean is not None
    name = "add_layer_norm_backward" if center else "add_rms_norm_backward"
    packed, few = grads.is_packed and sums.is_packed and layout.is_packed, rows <= FEW_ROWS * gpu.multiprocessors
    is_narrow = cols <= narrow.BACKWARD_COLS
    if is_narrow:
        whole = grads.is_whole and sums.is_whole and layout.is_whole
        tile = narrow.tile_of_backward(name, cols, layout.itemsize, gpu, whole=whole)
    else:
        tile = tile_of_backward(name, cols, layout.itemsize, gpu, packed=packed, few=few)
    sizes = (rows, cols, grads.apart, sums.apart)
    kind: dict[str, Any] = {"CENTER": center, "RESIDUAL": d_new_residual is not None, "SUMS": sums_of(new_residual)}
    stats = "mean rstd" if center else "rstd rstd"
    buffers = {
        "dx": Buffer(shape=tuple(new_residual.shape), dtype=new_residual.dtype),
        "dw": Buffer(shape=(cols,), dtype=weight.dtype),
    }
    if is_narrow:
        shares = narrow.shares(rows, tile, gpu)
    elif tile.parts:
        shares = ring.shares(rows, tile, gpu)
    elif tile.block >= cols:
        shares = shares_for(rows, tile.programs * gpu.multiprocessors, gpu.multiprocessors)
        shares = min(shares, cdiv(rows, tile.rows))
    else:
        group = min(tile.rows, rows)
        shares = cdiv(rows, group)
    is_shared = shares > 1 or tile.parts > 0  # a single share is the gradient itself
    gradients = "dw_shares" if is_shared else "dw"
    gradients += f" {gradients.replace('w', 'b', 1) if center else gradients}"
    on = f"dy {dsum} new_residual weight {stats} dx {gradients}"
    strides = (grads.apart, layout.apart, layout.apart if d_new_residual is None else sums.apart)
    ring_on = f"dy new_residual {residual} weight {stats} dx {gradients}"
    if is_narrow:
        reason = f"{cols} columns: a row stays in a warp"
        step = narrow.step_backward(
            rows, cols, strides, tile, gpu, on=ring_on, center=center, residual=d_new_residual is not None,
            sums=sums_of(new_residual),
        )  # fmt: skip
    elif tile.parts:
        reason = f"{cols} columns: rows stream through shared memory"
        step = ring.step(
            rows, cols, strides, tile, gpu, on=ring_on, center=center, residual=d_new_residual is not None
        )  # fmt: skip
        buffers |= ring.exchange(rows, tile)
    elif tile.block >= cols:
        reason = f"{cols} columns: a program takes many rows"
        kind |= {"STAGES": tile.stages, "ROWS": tile.rows, "BLOCK": tile.block, "PACKED": tile.packed and packed}
        step = Step(_backward_kernel, (shares,), *sizes, on=on, tile=tile, **kind, **tile.options())
    else:
        reason = f"{cols} columns: in chunks, twice"
        programs = group + cdiv(cols, GROUP_COLS)
        kind |= {"STAGES": tile.stages, "BLOCK": tile.block, "ROWS": GROUP_ROWS, "COLS": GROUP_COLS}
        grid = (shares * programs,)
        step = Step(
            add_norm_wide._wide_backward_kernel, grid, *sizes, group, programs,
            on=on, tile=tile, **kind, **tile.options(),
        )  # fmt: skip
    shared = shares_of(shares, cols, weight.dtype, center=center)
    buffers |= shared if is_shared else {name: shared[name] for name in ("db",) if center}
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(
            dy=grads.is_copy,
            d_new_residual=d_new_residual is not None and sums.is_copy,
            new_residual=not new_residual.is_contiguous(),
            weight=not weight.is_contiguous(),
        ),
        buffers=buffers,
        steps=(step, add_shares(shares, cols, center=center)) if is_shared else (step,),
        outputs=("dx", "dw", "db") if center else ("dx", "dw"),
    )


def check(x: torch.Tensor, residual: torch.Tensor, *columns: torch.Tensor) -> None:
    """Before a kernel reads past the end of something short."""
    if residual.shape != x.shape:
        raise BadInput(f"x and residual must have one shape, not {tuple(x.shape)} and {tuple(residual.shape)}")
    check_width(x, *columns)


def not_ours(x: torch.Tensor, residual: torch.Tensor, *columns: torch.Tensor | None) -> str:
    """Why a call goes to PyTorch's composition; empty where our kernels take it."""
    reason = why_torch(x, residual, *columns)
    if not reason and residual.shape != x.shape:
        return "x and residual differ in shape: PyTorch broadcasts"
    if not reason and x.shape[-1] == 1:
        return "rows of one column: their gradient is a difference of equals, of which PyTorch keeps more digits"
    return reason


def fake_forward(x: torch.Tensor, *, center: bool) -> tuple[torch.Tensor, ...]:
    """The outputs of `plan_forward`, without data."""
    y, *stats = rms_norm.fake_forward(x, center=center)
    return y, torch.empty_like(y), *stats
