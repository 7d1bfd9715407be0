"""gelu(x + bias), the bias over the last dimension: what a linear layer without its bias leaves to do; read x, write y.

The backward pass writes dx and adds up the bias's gradient on the way (`column_sums`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sublight.backend.jit import tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.pointwise import bias_gelu as cost
from sublight.op import Choice, Kernel, Op
from sublight.ops.kernels import column_sums
from sublight.ops.kernels.column_sums import add_to, sum_of
from sublight.ops.kernels.pointwise import (
    TEST_SHAPES,
    THREAD_BYTES,
    WARPS,
    block_for_columns,
    check_alike,
    check_bias,
    shapes_of,
    tile_grid,
    tile_rows,
    vector_of,
    widen,
)
from sublight.ops.kernels.rows import SMALL_ROWS, aligned_as, as_rows, facts, generator_for, random_rows, why_torch
from sublight.ops.pointwise.activation import Approximate, activate, kind_of
from sublight.ops.record.library import LIBRARY
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


def launch(x: torch.Tensor, bias: torch.Tensor, approximate: Approximate = "tanh") -> torch.Tensor:
    """Our kernel, whatever `choose` would say."""
    check_bias(x, bias)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x2 = as_rows(x)
    rows, cols = x2.shape
    vector, tile = vector_of(x2), _tile(x2)
    _bias_gelu_kernel[tile_grid(rows, cols, tile)](
        x2, bias.contiguous(), y, rows, cols // vector, x2.stride(0) // vector,
        KIND=kind_of(approximate), ROWS=tile.rows, BLOCK=tile.block, VECTOR=vector, **tile.options(),
    )  # fmt: skip
    return y


def _tile(x: torch.Tensor) -> Tile:
    """Two vectors a thread: one pays too much for the bias, and more were slower in a copy; few rows get more programs
    instead."""
    rows, cols = x.shape
    each = WARPS * 32 * THREAD_BYTES // x.element_size()
    block = block_for_columns(cols, each)
    rule = Tile(block=block, rows=(2 if rows > SMALL_ROWS[-1] else 1) * each // block, warps=WARPS)
    capability = facts(x).capability
    return tile_for("bias_gelu", cols, x.element_size(), packable=False, capability=capability, rule=rule)


def launch_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, approximate: Approximate = "tanh"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the bias."""
    check_alike(dy=dy, x=x)
    check_bias(x, bias)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    dy2, x2 = as_rows(dy), as_rows(x)
    rows, cols = x2.shape
    vector, plan = vector_of(dy2, x2), column_sums.plan("bias_gelu_backward", x2)
    shares, tile = column_sums.room_for(plan, dbias), plan.tile
    _bias_gelu_backward_kernel[(plan.parts, plan.shares)](
        dy2, x2, bias.contiguous(), dx, shares, rows, cols // vector, dy2.stride(0) // vector, x2.stride(0) // vector,
        KIND=kind_of(approximate), ROWS=tile.rows, BLOCK=tile.block, VECTOR=vector, **tile.options(),
    )  # fmt: skip
    column_sums.add_shares(shares, dbias)
    return dx, dbias


def _why_torch(x: torch.Tensor, bias: torch.Tensor) -> str:
    if reason := why_torch(x, bias):
        return reason
    return "" if bias.shape == x.shape[-1:] else "the bias is not one row: PyTorch broadcasts"


def choose(x: torch.Tensor, bias: torch.Tensor, approximate: Approximate = "tanh") -> Choice:
    """What `bias_gelu(x, bias)` runs, and why."""
    if reason := _why_torch(x, bias):
        return Choice(provider="torch", kernel="torch.add, torch.nn.functional.gelu", reason=reason)
    return Choice(provider="sublight", kernel="_bias_gelu_kernel", reason="one pass where PyTorch makes two")


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: Approximate = "tanh") -> torch.Tensor:
    """gelu(x + bias), gelu by tanh as GPT-2 has it unless told."""
    kind_of(approximate)
    return reference(x, bias, approximate) if _why_torch(x, bias) else _bias_gelu(x, bias, approximate)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _cpu_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.ops.aten.gelu_backward(dy, x + bias, approximate=approximate).contiguous()
    return dx, dx.reshape(-1, x.shape[-1]).sum(0)


_bias_gelu_backward = LIBRARY.op(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, str approximate) -> (Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=launch_backward,
    fake=lambda dy, x, bias, approximate: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(bias, memory_format=torch.contiguous_format),
    ),
)
_bias_gelu = LIBRARY.op(
    "bias_gelu(Tensor x, Tensor bias, str approximate) -> Tensor",
    cpu=lambda x, bias, approximate: reference(x, bias, approximate).contiguous(),
    cuda=launch,
    fake=lambda x, bias, approximate: torch.empty_like(x, memory_format=torch.contiguous_format),
    backward=lambda ctx, dy: (*_bias_gelu_backward(dy, *ctx.saved_tensors, ctx.approximate), None),
    setup_context=_setup_context,
)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    generator = generator_for(device, seed + 1_000_003)
    bias = torch.randn(shape["cols"], generator=generator, device=device, dtype=getattr(torch, dtype))
    return random_rows(shape, dtype, device, seed, scale=2.0), bias


BIAS_GELU = Op(
    name="bias_gelu",
    summary="gelu(x + bias), gelu by tanh",
    reference=reference,
    call=bias_gelu,
    launch=launch,
    launch_backward=launch_backward,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=tuple(
        Kernel(jit=jit) for jit in (_bias_gelu_kernel, _bias_gelu_backward_kernel, column_sums._shares_kernel)
    ),
    shapes=shapes_of((1600, 3072, 4096, 6400, 8192, 10240, 14336), small=14336),
    test_shapes=(*TEST_SHAPES[:-1], {"rows": 300, "cols": 130}, {"rows": 140, "cols": 264}),
    library_args=lambda x, bias: (x, bias, "tanh"),
)
