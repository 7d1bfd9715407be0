"""gelu(x + bias), the bias over the last dimension: what a linear layer without its bias leaves to do; read x, write y.

The backward pass writes dx and adds up the bias's gradient on the way (`column_sums`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sublight.backend.device import facts
from sublight.backend.jit import tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.pointwise import bias_gelu as cost
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels import column_sums
from sublight.ops.kernels.column_sums import add_to, sum_of
from sublight.ops.kernels.pointwise import (
    TEST_SHAPES,
    THREAD_BYTES,
    WARPS,
    block_for_columns,
    check_alike,
    check_bias,
    like,
    shapes_of,
    tile_grid,
    tile_rows,
    vector_of,
    widen,
)
from sublight.ops.kernels.rows import (
    SMALL_ROWS,
    Rows,
    aligned_as,
    copies_of,
    generator_for,
    random_rows,
    rows_of,
    why_torch,
)
from sublight.ops.pointwise.activation import Approximate, activate, kind_of
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered
from sublight.ops.record.tuning import Tile, tile_for


def reference(x: torch.Tensor, bias: torch.Tensor, approximate: Approximate = "tanh") -> torch.Tensor:
    return F.gelu(x + bias, approximate=approximate)


@triton.jit
def _bias_gelu_kernel(
    x_ptr, bias_ptr, y_ptr, rows, per_row, x_stride,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    cols = per_row * VECTOR
    first, there = tile_rows(tl.program_id(2) * tl.num_programs(1) + tl.program_id(1), rows, ROWS)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    index = tl.arange(0, ROWS)[:, None]
    mask = (index < there) & (col < cols)
    x = tl.load(x_ptr + (first + index) * x_stride * VECTOR + col, mask=mask)
    bias = tl.load(bias_ptr + aligned_as(cols) + col, mask=col < cols)
    y, _ = activate(widen(x, VECTOR) + widen(bias, VECTOR), KIND, x.dtype == tl.float32)
    tl.store(y_ptr + (first + index) * cols + col, y.to(x.dtype), mask=mask)


def plan_forward(x: torch.Tensor, bias: torch.Tensor, approximate: Approximate) -> Plan:
    """The launch that gives gelu(x + bias)."""
    check_bias(x, bias)
    layout = rows_of(x)
    vector, tile = vector_of(layout), _tile(layout, facts(x).capability)
    step = Step(
        _bias_gelu_kernel, tile_grid(layout.rows, layout.cols, tile),
        layout.rows, layout.cols // vector, layout.apart // vector, on="x bias y", tile=tile,
        KIND=kind_of(approximate), ROWS=tile.rows, BLOCK=tile.block, VECTOR=vector, **tile.options(),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="one pass where PyTorch makes two",
        copies=copies_of(x=layout.is_copy, bias=not bias.is_contiguous()),
        buffers={"y": Buffer(shape=tuple(x.shape), dtype=x.dtype)},
        steps=(step,),
        outputs=("y",),
    )


def _tile(layout: Rows, capability: int) -> Tile:
    """Two vectors a thread: one pays too much for the bias, and more were slower in a copy; few rows get more programs
    instead."""
    rows, cols, _, itemsize, *_ = layout
    each = WARPS * 32 * THREAD_BYTES // itemsize
    block = block_for_columns(cols, each)
    rule = Tile(block=block, rows=(2 if rows > SMALL_ROWS[-1] else 1) * each // block, warps=WARPS)
    return tile_for("bias_gelu", cols, itemsize, packable=False, capability=capability, rule=rule)


@triton.jit
def _bias_gelu_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, share_ptr, rows, per_row, dy_stride, x_stride,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(1)
    cols = per_row * VECTOR
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    index = tl.arange(0, ROWS)[:, None]
    # the same in every step, so that a step adds one number to each
    dy_place = index.to(tl.int64) * dy_stride * VECTOR + col
    x_place = index.to(tl.int64) * x_stride * VECTOR + col
    dx_place = index.to(tl.int64) * cols + col
    bias = widen(tl.load(bias_ptr + aligned_as(cols) + col, mask=col < cols, other=0.0), VECTOR)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    rest = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(share, (rows - 1) // ROWS + 1, tl.num_programs(1), num_stages=1):
        first, there = tile_rows(tile, rows, ROWS)
        mask = (index < there) & (col < cols)
        dy = tl.load(dy_ptr + first * dy_stride * VECTOR + dy_place, mask=mask, other=0.0)
        x = tl.load(x_ptr + first * x_stride * VECTOR + x_place, mask=mask, other=0.0)
        _, slope = activate(widen(x, VECTOR) + bias, KIND, x.dtype == tl.float32)
        dx = widen(dy, VECTOR) * slope
        tl.store(dx_ptr + first * cols + dx_place, dx.to(x.dtype), mask=mask)
        total, rest = add_to(total, rest, dx, x.dtype == tl.float32)
    out = sum_of(total, rest, x_ptr.dtype.element_ty == tl.float32)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(share_ptr + share.to(tl.int64) * cols + place, out.to(share_ptr.dtype.element_ty), mask=place < cols)


def plan_backward(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, approximate: Approximate) -> Plan:
    """The launch that gives dx and shares of the bias's gradient, then the one that adds the shares up."""
    check_alike(dy=dy, x=x)
    check_bias(x, bias)
    grads, layout = rows_of(dy), rows_of(x)
    vector, sharing = vector_of(grads, layout), column_sums.share_out("bias_gelu_backward", layout, facts(x), "dbias")
    tile = sharing.tile
    step = Step(
        _bias_gelu_backward_kernel, sharing.grid,
        layout.rows, layout.cols // vector, grads.apart // vector, layout.apart // vector,
        on=f"dy x bias dx {sharing.into}", tile=tile,
        KIND=kind_of(approximate), ROWS=tile.rows, BLOCK=tile.block, VECTOR=vector, **tile.options(),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="dx and its sum over rows in one pass",
        copies=copies_of(dy=grads.is_copy, x=layout.is_copy, bias=not bias.is_contiguous()),
        buffers={"dx": Buffer(shape=tuple(x.shape), dtype=x.dtype), **sharing.buffers(bias.dtype)},
        steps=(step, *sharing.steps()),
        outputs=("dx", "dbias"),
    )


KERNELS = tuple(Kernel(jit=jit) for jit in (_bias_gelu_kernel, _bias_gelu_backward_kernel, column_sums._shares_kernel))


def _why_torch(x: torch.Tensor, bias: torch.Tensor, approximate: Approximate) -> str:
    if reason := why_torch(x, bias):
        return reason
    return "" if bias.shape == x.shape[-1:] else "the bias is not one row: PyTorch broadcasts"


_bias_gelu_backward = Registered(
    schema="bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, str approximate) -> (Tensor dx, Tensor dbias)",
    plan=plan_backward,
    fake=lambda dy, x, bias, approximate: (like(x), like(bias)),
)
_bias_gelu = Registered(
    schema="bias_gelu(Tensor x, Tensor bias, str approximate) -> Tensor y",
    reference=reference,
    theirs="torch.add, torch.nn.functional.gelu",
    why_torch=_why_torch,
    plan=plan_forward,
    fake=lambda x, bias, approximate: like(x),
    gradient=Gradient(by=_bias_gelu_backward, saves=("x", "bias"), gives=("x", "bias"), options=("approximate",)),
)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: Approximate = "tanh") -> torch.Tensor:
    """gelu(x + bias), gelu by tanh as GPT-2 has it by default."""
    kind_of(approximate)
    return _bias_gelu.call(x, bias, approximate)  # type: ignore[no-any-return]


def plan(x: torch.Tensor, bias: torch.Tensor, approximate: Approximate = "tanh") -> Plan:
    """What `bias_gelu(x, bias)` runs, and why."""
    return _bias_gelu.decide(x, bias, approximate)


def launch(x: torch.Tensor, bias: torch.Tensor, approximate: Approximate = "tanh") -> torch.Tensor:
    """Our kernel, whether or not it wins."""
    return _bias_gelu.by_kernels(x, bias, approximate)  # type: ignore[no-any-return]


def launch_backward(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, approximate: Approximate = "tanh") -> Inputs:
    """The gradients of x and of the bias."""
    return _bias_gelu_backward.by_kernels(dy, x, bias, approximate)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    generator = generator_for(device, seed + 1_000_003)
    bias = torch.randn(shape["cols"], generator=generator, device=device, dtype=getattr(torch, dtype))
    return random_rows(shape, dtype, device, seed, scale=2.0), bias


BIAS_GELU = Op(
    name="bias_gelu",
    summary="gelu(x + bias), gelu by tanh",
    reference=reference,
    call=bias_gelu,
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=launch_backward, kernels=KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=shapes_of((1600, 3072, 4096, 6400, 8192, 10240, 14336), small=14336),
    test_shapes=(*TEST_SHAPES[:-1], {"rows": 300, "cols": 130}, {"rows": 140, "cols": 264}),
    library_args=lambda x, bias: (x, bias, "tanh"),
)
