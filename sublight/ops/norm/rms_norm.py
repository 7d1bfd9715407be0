"""RMSNorm over the last dimension, and the kernels of LayerNorm: x / sqrt(mean(x²) + eps) * weight; read x, write y.

One program takes one row, holds it in registers, and reads it once: the sum of squares, then the row scaled. LayerNorm
is the same with the mean taken off first and a bias added last; `CENTER` is a constant of the same kernels. A row that
fills no power of two is held as two blocks: 5,120 columns in one block of 8,192 took 161 µs on an H200, in two 131 µs.
Rows too narrow to fill a program are in `narrow.py`, rows that no multiprocessor holds in `wide.py`.

The gradient reads x and dy and writes dx. The weight's gradient is a sum over all rows: a few programs on each
multiprocessor take many rows each and add up their share in a fixed order, and a second launch adds the shares, so the
result is the same every time. On Hopper the rows stream through shared memory instead (`ring.py`).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from sublight.backend.device import facts
from sublight.backend.jit import cdiv, tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.norm import rms_norm as cost
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels import column_sums
from sublight.ops.kernels.rows import (
    NORM_TEST_SHAPES,
    NORM_WIDTHS,
    aligned_as,
    copies_of,
    forget,
    random_columns,
    random_rows,
    row_shapes,
    rows_of,
    sums_of,
    why_torch,
)
from sublight.ops.norm import narrow, ring, wide
from sublight.ops.norm.parts import check_width, load_columns, reciprocal_root, scaled
from sublight.ops.norm.tiles import FEW_ROWS, TILE_COLS, tile_of, tile_of_backward
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered, peer
from sublight.ops.record.tuning import Tile
from sublight.timing import Thunk

EPS = 1e-6


def reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float = EPS) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


@triton.jit
def _row_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, cols, x_stride, eps,
    CENTER: tl.constexpr, STATS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, PACKED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_ptr + row * x_stride, y_ptr + row * cols
    col = tl.arange(0, BLOCK)
    mask = col < (cols if TAIL == 0 else BLOCK)  # the first of two blocks is full
    x = tl.load(x_row + col, mask=mask, other=0.0)
    if TAIL > 0:
        far = BLOCK + tl.arange(0, TAIL)
        rest = tl.load(x_row + far, mask=far < cols, other=0.0)
    if EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
        if TAIL > 0:
            far_w, far_b = load_columns(w_ptr, b_ptr, far, cols, CENTER)
    mean = 0.0
    if CENTER:
        total = tl.sum(x.to(tl.float32), 0)
        if TAIL > 0:
            total += tl.sum(rest.to(tl.float32), 0)
        mean = tl.div_rn(total, cols * 1.0)
        if STATS:
            tl.store(mean_ptr + row, mean)
        x = forget(x, mean, PACKED)
        if TAIL > 0:
            rest = forget(rest, mean, PACKED)
    centred = tl.where(mask, x.to(tl.float32) - mean, 0.0)
    squares = tl.sum(centred * centred, 0)
    if TAIL > 0:
        centred = tl.where(far < cols, rest.to(tl.float32) - mean, 0.0)
        squares += tl.sum(centred * centred, 0)
    rstd = reciprocal_root(squares, cols, eps)
    if STATS:
        tl.store(rstd_ptr + row, rstd)
    x = forget(x, rstd, PACKED)
    if not EARLY:
        w, b = load_columns(w_ptr, b_ptr, col, cols, CENTER)
    tl.store(y_row + col, scaled(x, mean, rstd, w, b, CENTER).to(y_ptr.dtype.element_ty), mask=mask)
    if TAIL > 0:
        rest = forget(rest, rstd, PACKED)
        if not EARLY:
            far_w, far_b = load_columns(w_ptr, b_ptr, far, cols, CENTER)
        y = scaled(rest, mean, rstd, far_w, far_b, CENTER)
        tl.store(y_row + far, y.to(y_ptr.dtype.element_ty), mask=far < cols)


def plan_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, stats: bool = True
) -> Plan:
    """Which kernel normalises these rows, and how; `stats` are a row's mean and deviation, for the backward pass."""
    rows, cols, apart, itemsize, *_ = layout = rows_of(x)
    gpu = facts(x)
    few = rows <= FEW_ROWS * gpu.multiprocessors
    name = "rms_norm" if bias is None else "layer_norm"
    tile = tile_of(name, cols, itemsize, packed=layout.is_packed, capability=gpu.capability, few=few)
    constants: dict[str, int] = {"CENTER": bias is not None, "STATS": stats}
    on = f"x weight {'bias' if bias is not None else 'weight'} y"
    on += f" {'mean' if bias is not None else 'rstd'} rstd" if stats else " y y"  # what is not used is not looked at
    if tile is None:
        reason = f"{cols} columns: in chunks, twice"
        constants |= {"BLOCK": wide.STREAM_BLOCK, "num_warps": 16}
        step = Step(wide._stream_kernel, (rows,), cols, apart, eps, on=on, **constants)
    elif cols <= TILE_COLS:
        reason = f"{cols} columns: {tile.rows_text}"
        constants |= {"ROWS": tile.rows, "BLOCK": tile.block, "EARLY": few, **tile.options()}
        grid = (cdiv(rows, tile.rows),)
        step = Step(narrow._tile_kernel, grid, rows, cols, apart, eps, on=on, tile=tile, **constants)
    else:
        reason = f"{cols} columns: one row in registers"
        constants |= {"BLOCK": tile.block, "TAIL": tile.tail, "PACKED": tile.packed, "EARLY": few, **tile.options()}
        step = Step(_row_kernel, (rows,), cols, apart, eps, on=on, tile=tile, **constants)
    outputs = {"y": Buffer(shape=tuple(x.shape), dtype=x.dtype)}
    if stats:
        names = ("rstd",) if bias is None else ("mean", "rstd")
        outputs |= {name: Buffer(shape=(rows,), dtype=torch.float32) for name in names}
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(
            x=layout.is_copy,
            weight=not weight.is_contiguous(),
            bias=bias is not None and not bias.is_contiguous(),
        ),
        buffers=outputs,
        steps=(step,),
        outputs=tuple(outputs),
    )


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


def plan_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor
) -> Plan:
    """The launches that give dx and shares of the weight's gradient, then the one that adds the shares up."""
    layout, grads, gpu = rows_of(x), rows_of(dy), facts(x)
    rows, cols, center = layout.rows, layout.cols, mean is not None
    packed = layout.is_packed and grads.is_packed
    name = "layer_norm_backward" if center else "rms_norm_backward"
    tile: Tile | None
    is_narrow = cols <= narrow.BACKWARD_COLS
    if is_narrow:
        whole = layout.is_whole and grads.is_whole
        tile = narrow.tile_of_backward(name, cols, layout.itemsize, gpu, whole=whole)
    else:
        tile = tile_of_backward(name, cols, layout.itemsize, gpu, packed=packed)
    strides = (grads.apart, layout.apart)
    stats, gradients = ("mean rstd", "dw_shares db_shares") if center else ("rstd rstd", "dw_shares dw_shares")
    buffers = {"dx": Buffer(shape=tuple(x.shape), dtype=x.dtype), "dw": Buffer(shape=(cols,), dtype=weight.dtype)}
    if tile is not None and is_narrow:
        reason = f"{cols} columns: a row stays in a warp"
        on = f"dy x x weight {stats} dx {gradients}"
        shares = narrow.shares(rows, tile, gpu)
        steps = [
            narrow.step_backward(rows, cols, (*strides, layout.apart), tile, gpu, on=on, center=center, sums=sums_of(x))
        ]
    elif tile is not None and tile.parts:
        reason = f"{cols} columns: rows stream through shared memory"
        on = f"dy x x weight {stats} dx {gradients}"
        shares = ring.shares(rows, tile, gpu)
        buffers |= ring.exchange(rows, tile)
        steps = [ring.step(rows, cols, (*strides, layout.apart), tile, gpu, on=on, center=center)]
    elif tile is not None:
        reason = f"{cols} columns: a program takes many rows"
        shares = column_sums.shares_for(rows, tile.programs * gpu.multiprocessors, gpu.multiprocessors)
        constants = {"BLOCK": tile.block, "STAGES": tile.stages, "PACKED": tile.packed and packed, **tile.options()}
        on = f"dy x weight {stats} dx {gradients}"
        steps = [Step(_backward_kernel, (shares,), rows, cols, *strides, on=on, tile=tile, CENTER=center, **constants)]
    else:
        reason = f"{cols} columns: in chunks, twice"
        columns = cdiv(cols, 128)
        shares = max(1, min(cdiv(rows, 32), cdiv(8 * gpu.multiprocessors, columns)))
        steps = [
            Step(
                wide._stream_backward_kernel, (rows,), cols, *strides,
                on=f"dy x weight {stats} dx", CENTER=center, BLOCK=wide.STREAM_BLOCK, num_warps=16,
            ),
            Step(
                wide._columns_kernel, (columns, shares), rows, cols, *strides, cdiv(rows, shares),
                on=f"dy x {stats} {gradients}", CENTER=center, ROWS=16, BLOCK=128, num_warps=8,
            ),
        ]  # fmt: skip
    buffers |= shares_of(shares, cols, weight.dtype, center=center)
    return Plan(
        provider="sublight",
        reason=reason,
        copies=copies_of(x=layout.is_copy, dy=grads.is_copy, weight=not weight.is_contiguous()),
        buffers=buffers,
        steps=(*steps, add_shares(shares, cols, center=center)),
        outputs=("dx", "dw", "db") if center else ("dx", "dw"),
    )


def shares_of(shares: int, cols: int, dtype: torch.dtype, *, center: bool) -> dict[str, Buffer]:
    """The buffers for programs' shares of the weight's and the bias's gradient, and for the bias's gradient itself."""
    buffers = {"dw_shares": Buffer(shape=(shares, cols), dtype=torch.float32)}
    if center:
        buffers |= {"db_shares": buffers["dw_shares"], "db": Buffer(shape=(cols,), dtype=dtype)}
    return buffers


def add_shares(shares: int, cols: int, *, center: bool) -> Step:
    """The launch that adds the shares up, in their order."""
    on = "dw_shares db_shares dw db" if center else "dw_shares dw_shares dw dw"
    return column_sums.add_shares(shares, cols, on, 2 if center else 1)


SHARES_KERNEL = Kernel(jit=column_sums._shares_kernel)
KERNELS = (
    narrow.KERNEL,
    narrow.BACKWARD_KERNEL,
    Kernel(
        jit=_row_kernel,
        spills="up to 56 bytes a thread at 65,536 columns (an H200 32), in the fastest of six tiles that were measured",
    ),
    Kernel(
        jit=_backward_kernel,
        spills="from 8,192 columns on x, dy, the weight and two fp32 sums overflow the registers; on an H200 that took "
        "356 µs (layer_norm, 8192x16384), the kernels that read the rows twice 423 µs (4096x32768)",
    ),
    ring.KERNEL,
    *wide.KERNELS,
    SHARES_KERNEL,
)


def fake_forward(x: torch.Tensor, *, center: bool) -> tuple[torch.Tensor, ...]:
    """The outputs of `plan_forward`, without data."""
    rows = x.numel() // x.shape[-1]
    stats = [x.new_empty(rows, dtype=torch.float32) for _ in range(2 if center else 1)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), *stats


def fake_backward(x: torch.Tensor, weight: torch.Tensor, *, center: bool) -> tuple[torch.Tensor, ...]:
    """The outputs of `plan_backward`, without data."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, *(torch.empty_like(weight, memory_format=torch.contiguous_format) for _ in range(2 if center else 1))


RMS_BACKWARD = Registered(
    schema="rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor dx, Tensor dw)",
    plan=lambda dy, x, weight, rstd: plan_backward(dy, x, weight, None, rstd),
    fake=lambda dy, x, weight, rstd: fake_backward(x, weight, center=False),
)
RMS = Registered(
    schema="rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)",
    reference=reference,
    theirs="torch.nn.functional.rms_norm",
    why_torch=lambda x, weight, eps: why_torch(x, weight),
    plan=lambda x, weight, eps: plan_forward(x, weight, None, eps),
    plan_results=lambda x, weight, eps: plan_forward(x, weight, None, eps, stats=False),
    fake=lambda x, weight, eps: fake_forward(x, center=False),
    results=1,
    gradient=Gradient(by=RMS_BACKWARD, saves=("x", "weight", "rstd"), gives=("x", "weight")),
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = EPS) -> torch.Tensor:
    """RMSNorm over the last dimension: our kernel where it wins, PyTorch's elsewhere."""
    if weight is None or weight.shape != x.shape[-1:]:
        return reference(x, weight, eps)  # PyTorch's own, or its own complaint
    return RMS.call(x, weight, eps)  # type: ignore[no-any-return]


def plan(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = EPS) -> Plan:
    """What `rms_norm(x, weight, eps)` runs, and why."""
    return RMS.decide(x, weight, eps)


def launch(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """Our forward kernels, whether or not they win."""
    check_width(x, weight)
    return RMS.by_kernels(x, weight, eps)[0]  # type: ignore[no-any-return]


def launch_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Inputs:
    _, rstd = RMS.by_kernels(x, weight, EPS)
    return RMS_BACKWARD.by_kernels(dy, x, weight, rstd)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return random_rows(shape, dtype, device, seed), *random_columns(shape, dtype, device, seed, 1)


def _liger(x: torch.Tensor, weight: torch.Tensor) -> Thunk:
    apply = peer("liger_kernel.ops.rms_norm", "LigerRMSNormFunction").apply
    return partial(apply, x, weight, EPS, 0.0, "llama", False)  # not in place: the gradient is used again


def _quack(x: torch.Tensor, weight: torch.Tensor) -> Thunk:
    return partial(peer("quack.rmsnorm", "rmsnorm"), x, weight, eps=EPS)


RMS_NORM = Op(
    name="rms_norm",
    summary="root-mean-square normalisation over the last dimension",
    reference=reference,
    call=rms_norm,
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=launch_backward, kernels=KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=row_shapes(NORM_WIDTHS),
    test_shapes=NORM_TEST_SHAPES,
    peers={"liger": _liger, "quack": _quack},
    library_args=lambda *inputs: (*inputs, EPS),
)
