"""residual + dropout(x + bias): what stands after a transformer's every linear layer; read x and residual, write y.

The mask is drawn from a counter (`philox`): it depends on the seed and on an element's place alone. So the backward
pass draws it again and nothing is kept; the same seed gives the same mask, however the work is shared out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sublight.backend.device import facts
from sublight.backend.jit import tl, triton
from sublight.backend.launch import Step
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.pointwise import bias_dropout_residual as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels import column_sums, philox
from sublight.ops.kernels.column_sums import add_to, sum_of
from sublight.ops.kernels.philox import is_kept
from sublight.ops.kernels.pointwise import (
    TEST_SHAPES,
    Through,
    check_alike,
    check_bias,
    grid,
    is_wide,
    like,
    shapes_of,
    tile_of,
    tile_rows,
    vector_of,
    vector_places,
    widen,
)
from sublight.ops.kernels.rows import copies_of, generator_for, random_rows, rows_of, why_torch
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered

P = 0.1


def reference(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | int, p: float = P
) -> torch.Tensor:
    keep = philox.kept(torch.as_tensor(seed, device=x.device), x.shape, p)
    return residual + torch.where(keep, (x + bias) * scale_of(p), 0.0)


def scale_of(p: float) -> float:
    """So that a sum is expected to stay what it was; with p = 1 there is nothing to scale."""
    return 0.0 if p == 1 else 1 / (1 - p)


@triton.jit(do_not_specialize=["number"])
def _bias_dropout_residual_kernel(
    x_ptr, bias_ptr, residual_ptr, seed_ptr, y_ptr, vectors, per_row, x_stride, residual_stride,
    number: tl.int64, threshold, scale,
    SEEDED: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    vector, row, col, mask = vector_places(vectors, per_row, BLOCK, VECTOR, WIDE)
    x = tl.load(x_ptr + row * x_stride * VECTOR + col, mask=mask)
    residual = tl.load(residual_ptr + row * residual_stride * VECTOR + col, mask=mask)
    bias = tl.load(bias_ptr + col, mask=mask)
    seed = tl.full([], 0, tl.int64) + number
    if SEEDED:
        seed = tl.load(seed_ptr)
    keep = _kept_at(seed, vector, tl.arange(0, VECTOR)[None, :], threshold, VECTOR, WIDE, ROUNDS)
    full = (x.to(tl.float32) + bias.to(tl.float32)) * scale
    y = residual.to(tl.float32) + tl.where(keep, full, 0.0)
    tl.store(y_ptr + row * per_row * VECTOR + col, y.to(x.dtype), mask=mask)


@triton.jit
def _kept_at(seed, vector, lane, threshold, VECTOR: tl.constexpr, WIDE: tl.constexpr, ROUNDS: tl.constexpr):
    """For the lane-th element from the begin of a vector; where fours fill a vector, the compiler sees that each shares
    a counter."""
    first = vector.to(tl.int64) if WIDE else vector.to(tl.uint32)
    if VECTOR >= 4:
        return is_kept(seed, first * (VECTOR // 4) + (lane // 4).to(first.dtype), lane, threshold, ROUNDS)
    else:
        place = first * VECTOR + lane.to(first.dtype)
        return is_kept(seed, place >> 2, place.to(tl.int32), threshold, ROUNDS)


def plan_forward(
    x: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    seed: torch.Tensor | None,
    number: int,
    p: float,
) -> Plan:
    """The launch that gives y. The seed is read from memory, or is `number`, on which no plan depends."""
    check_alike(x=x, residual=residual)
    check_bias(x, bias)
    layout, other, tile = rows_of(x), rows_of(residual), tile_of("bias_dropout_residual", x)
    vector, elements = vector_of(layout, other), layout.rows * layout.cols
    vectors = elements // vector
    step = Step(
        _bias_dropout_residual_kernel, grid(elements, tile),
        vectors, layout.cols // vector, layout.apart // vector, other.apart // vector,
        "number", philox.threshold_of(p), scale_of(p),
        on=f"x bias residual {'x' if seed is None else 'seed'} y", tile=tile,
        SEEDED=seed is not None, BLOCK=tile.block, VECTOR=vector, WIDE=is_wide(vectors), ROUNDS=philox.ROUNDS,
        **tile.options(),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="one pass, no mask kept",
        copies=copies_of(x=layout.is_copy, residual=other.is_copy, bias=not bias.is_contiguous()),
        buffers={"y": Buffer(shape=tuple(x.shape), dtype=x.dtype)},
        steps=(step,),
        outputs=("y",),
    )


@triton.jit(do_not_specialize=["number"])
def _bias_dropout_backward_kernel(
    dy_ptr, seed_ptr, dx_ptr, share_ptr, rows, per_row, dy_stride, number: tl.int64, threshold, scale,
    SEEDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(1)
    cols = per_row * VECTOR
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    index = tl.arange(0, ROWS)[:, None]
    # the same in every step, so that a step adds one number to each
    dy_place = index.to(tl.int64) * dy_stride * VECTOR + col
    dx_place = index.to(tl.int64) * cols + col
    seed = tl.full([], 0, tl.int64) + number
    if SEEDED:
        seed = tl.load(seed_ptr)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    rest = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(share, (rows - 1) // ROWS + 1, tl.num_programs(1), num_stages=1):
        first, there = tile_rows(tile, rows, ROWS)
        mask = (index < there) & (col < cols)
        dy = tl.load(dy_ptr + first * dy_stride * VECTOR + dy_place, mask=mask, other=0.0)
        row = first + index if WIDE else tile * ROWS + index
        keep = _kept_at(seed, row * per_row, col, threshold, VECTOR, WIDE, ROUNDS)
        dx = tl.where(keep, widen(dy, VECTOR) * scale, 0.0)
        tl.store(dx_ptr + first * cols + dx_place, dx.to(dy.dtype), mask=mask)
        total, rest = add_to(total, rest, dx, dy.dtype == tl.float32)
    out = sum_of(total, rest, dy_ptr.dtype.element_ty == tl.float32)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(share_ptr + share.to(tl.int64) * cols + place, out.to(share_ptr.dtype.element_ty), mask=place < cols)


def plan_backward(dy: torch.Tensor, seed: torch.Tensor | None, number: int, p: float) -> Plan:
    """The launch that gives dx and shares of the bias's gradient, then the one that adds the shares up."""
    layout = rows_of(dy)
    vector, sharing = vector_of(layout), column_sums.share_out("bias_dropout_backward", layout, facts(dy), "dbias")
    tile = sharing.tile
    step = Step(
        _bias_dropout_backward_kernel, sharing.grid,
        layout.rows, layout.cols // vector, layout.apart // vector, "number", philox.threshold_of(p), scale_of(p),
        on=f"dy {'dy' if seed is None else 'seed'} dx {sharing.into}", tile=tile,
        SEEDED=seed is not None, ROWS=tile.rows, BLOCK=tile.block, VECTOR=vector,
        WIDE=is_wide(layout.rows * layout.cols // vector), ROUNDS=philox.ROUNDS, **tile.options(),
    )  # fmt: skip
    return Plan(
        provider="sublight",
        reason="the mask drawn again; dx and its sum over rows in one pass",
        copies=copies_of(dy=layout.is_copy),
        buffers={"dx": Buffer(shape=tuple(dy.shape), dtype=dy.dtype), **sharing.buffers(dy.dtype)},
        steps=(step, *sharing.steps()),
        outputs=("dx", "dbias"),
    )


KERNELS = tuple(
    Kernel(jit=jit)
    for jit in (_bias_dropout_residual_kernel, _bias_dropout_backward_kernel, column_sums._shares_kernel)
)


def _seed(seed: torch.Tensor | int, x: torch.Tensor, p: float) -> tuple[torch.Tensor | None, int]:
    """The seed as a tensor on the device, read there, or as a number."""
    if not 0 <= p <= 1:
        raise BadInput(f"p = {p} is no probability: use a number from 0 to 1")
    if isinstance(seed, int):
        return None, (seed + 2**63) % 2**64 - 2**63
    if not isinstance(seed, torch.Tensor):
        raise BadInput(f"seed is {type(seed).__name__}: use an int, or one int64 on {x.device}")
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != x.device:
        raise BadInput(
            f"seed is {seed.dtype} {tuple(seed.shape)} on {seed.device}: use an int, or one int64 on {x.device}"
        )
    return seed, 0


def _why_torch(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | None, number: int, p: float
) -> str:
    if reason := why_torch(x, bias, residual):
        return reason
    if bias.shape != x.shape[-1:] or residual.shape != x.shape:
        return "the shapes differ: PyTorch broadcasts"
    return ""


def _backward_by_torch(saved: Mapping[str, Any], grads: tuple[Any, ...]) -> tuple[Any, ...]:
    (dy,) = grads
    seed = torch.as_tensor(saved["number"] if saved["seed"] is None else saved["seed"], device=dy.device)
    dx = torch.where(philox.kept(seed, dy.shape, saved["p"]), dy * scale_of(saved["p"]), 0.0)
    return dx, dx.reshape(-1, dy.shape[-1]).sum(0), dy


_backward = Registered(
    schema="bias_dropout_residual_backward(Tensor dy, Tensor? seed, int number, float p) -> (Tensor dx, Tensor dbias)",
    plan=plan_backward,
    fake=lambda dy, seed, number, p: (like(dy), dy.new_empty(dy.shape[-1:])),
    free=("number",),
)
_bias_dropout_residual = Registered(
    schema="bias_dropout_residual(Tensor x, Tensor bias, Tensor residual, Tensor? seed, int number, float p)"
    " -> Tensor y",
    reference=lambda x, bias, residual, seed, number, p: reference(
        x, bias, residual, number if seed is None else seed, p
    ),
    theirs="torch, integer by integer",
    why_torch=_why_torch,
    plan=plan_forward,
    fake=lambda x, bias, residual, seed, number, p: like(x),
    free=("number",),
    gradient=Gradient(
        by=Through(
            lambda dy, seed, number, p: (*_backward.call(dy, seed, number, p), dy)
        ),  # the residual's is dy itself
        saves=("seed",),
        gives=("x", "bias", "residual"),
        options=("number", "p"),
        by_torch=_backward_by_torch,
    ),
)


def bias_dropout_residual(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | int, p: float = P
) -> torch.Tensor:
    """residual + dropout(x + bias, p), by a mask that the seed alone decides: use each seed once.

    A seed that is an int64 tensor on the device is read when the kernel runs: in a CUDA graph it can be counted up
    between replays, and compiled code need not be compiled again for another one.
    """
    return _bias_dropout_residual.call(x, bias, residual, *_seed(seed, x, p), p)  # type: ignore[no-any-return]


def plan(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | int, p: float = P) -> Plan:
    """What `bias_dropout_residual(x, bias, residual, seed)` runs, and why."""
    return _bias_dropout_residual.decide(x, bias, residual, *_seed(seed, x, p), p)


def launch(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | int, p: float = P
) -> torch.Tensor:
    """Our kernel, whether or not it wins."""
    return _bias_dropout_residual.by_kernels(x, bias, residual, *_seed(seed, x, p), p)  # type: ignore[no-any-return]


def launch_backward(dy: torch.Tensor, seed: torch.Tensor | int, p: float = P) -> Inputs:
    """The gradients of x and of the bias; that of the residual is dy itself."""
    return _backward.by_kernels(dy, *_seed(seed, dy, p), p)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    generator = generator_for(device, seed + 1_000_003)
    bias = torch.randn(shape["cols"], generator=generator, device=device, dtype=getattr(torch, dtype))
    x, residual = random_rows(shape, dtype, device, seed), random_rows(shape, dtype, device, seed + 2_000_003)
    return x, bias, residual, torch.full((1,), 1_000_003 * seed + 7, device=device)


def _launch_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor
) -> Inputs:
    return *launch_backward(dy, seed), dy


BIAS_DROPOUT_RESIDUAL = Op(
    name="bias_dropout_residual",
    summary="residual + dropout(x + bias), the mask from a counter",
    reference=reference,
    call=bias_dropout_residual,
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=_launch_backward, kernels=KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=shapes_of((768, 1600, 2560, 4096, 5120, 8192, 12288), small=4096),
    test_shapes=(*TEST_SHAPES[:-1], {"rows": 300, "cols": 130}, {"rows": 140, "cols": 264}),
    batch="",  # a row's mask depends on its place
    library_args=lambda x, bias, residual, seed: (x, bias, residual, seed, 0, P),
)
