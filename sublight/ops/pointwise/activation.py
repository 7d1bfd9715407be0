"""Activations, one read and one write: gelu by the error function, gelu by tanh, relu².

Every gate here is x times a share of it between 0 and 1: silu takes the sigmoid, gelu the normal distribution, and
gelu's tanh form is a sigmoid too, because (1 + tanh(u)) / 2 = sigmoid(2u), which for negative x loses no digits. For
16-bit tensors a share costs one exponential and one reciprocal: at the speed of a copy there is time for some 25
instructions an element, and the library's erf alone takes more.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from sublight.backend.jit import tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.pointwise import activation as cost
from sublight.errors import BadInput
from sublight.op import Kernel, Op, Plan, Provider
from sublight.ops.kernels.pointwise import (
    TEST_SHAPES,
    check_alike,
    exp_of,
    like,
    plan_pointwise,
    shapes_of,
    vector_places,
)
from sublight.ops.kernels.rows import HAS_ASSEMBLY, random_rows, why_torch
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered, peer
from sublight.timing import Thunk

Approximate = Literal["none", "tanh"]
KINDS = {"none": "gelu", "tanh": "gelu_tanh"}

LOG2_E = tl.constexpr(1.4426950408889634)
ROOT_HALF = tl.constexpr(0.7071067811865476)
NORMAL_PEAK = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
TANH_CUBE = tl.constexpr(0.07135481282553124)  # of which 0.044715
FLAT_SQUARE = tl.constexpr(1e4)  # beyond |x| = 100 the slope of every share is 0; its factor must not be infinite


def gelu_reference(x: torch.Tensor, approximate: Approximate = "none") -> torch.Tensor:
    return F.gelu(x, approximate=approximate)


def relu2_reference(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


@triton.jit
def reciprocal(x):
    """1 / x for x from 1 on: one instruction, where a division minds numbers too large or too small in six more."""
    if HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    """1 / (1 + exp(-x)), and what it lacks of 1; for fp32 results without the hardware's quick exponential and quick
    division, and without the digits that a difference from 1 would lose."""
    if EXACT:
        e = exp_of(-tl.abs(x))
        large = reciprocal(1.0 + e)
        large = tl.fma(large, tl.fma(-1.0 - e, large, 1.0), large)  # Newton's step: as right as a division
        small = e * large
        return tl.where(x < 0, small, large), tl.where(x < 0, large, small)
    else:
        share = reciprocal(1.0 + tl.exp2(-x * LOG2_E))
        return share, 1.0 - share


@triton.jit
def normal(x, EXACT: tl.constexpr):
    """The normal distribution up to x, and its density. For 16-bit results Hastings' formula (Abramowitz and Stegun
    7.1.26, within 1.5e-7), which shares its exponential with the density and keeps the digits of the lower tail."""
    if EXACT:
        e = exp_of(x * x * -0.5)
        return 0.5 + 0.5 * tl.erf(x * ROOT_HALF), e * NORMAL_PEAK
    else:
        e = tl.exp2(x * x * (-0.5 * LOG2_E))
        t = reciprocal(1.0 + tl.abs(x) * (0.3275911 * ROOT_HALF))
        p = t * (0.5 * 1.061405429) + (0.5 * -1.453152027)
        p = p * t + (0.5 * 1.421413741)
        p = p * t + (0.5 * -0.284496736)
        p = p * t + (0.5 * 0.254829592)
        tail = p * t * e
        return tl.where(x < 0, tail, 1.0 - tail), e * NORMAL_PEAK


@triton.jit
def share_of(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """What part of x passes, and how fast that grows with x."""
    if KIND == "gelu":
        return normal(x, EXACT)
    elif KIND == "gelu_tanh":
        if EXACT:
            share, rest = sigmoid(x * (TANH_SCALE + TANH_CUBE * (x * x)), EXACT)
        else:  # the exponential's base is in the factors already: a multiplication less
            share = reciprocal(1.0 + tl.exp2(x * (-TANH_SCALE * LOG2_E - TANH_CUBE * LOG2_E * (x * x))))
            rest = 1.0 - share
        return share, share * rest * (TANH_SCALE + 3.0 * TANH_CUBE * tl.minimum(x * x, FLAT_SQUARE))
    else:
        tl.static_assert(KIND == "silu")
        share, rest = sigmoid(x, EXACT)
        return share, share * rest


@triton.jit
def activate(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """The activation of x, in fp32, and its slope; what is not used is not computed."""
    if KIND == "relu2":
        r = tl.where(x < 0, 0.0, x)  # NaN passes
        return r * r, 2.0 * r
    else:
        share, slope = share_of(x, KIND, EXACT)
        return x * share, share + x * slope


@triton.jit
def _activate_at(x_ptrs, y_ptrs, mask, KIND: tl.constexpr):
    x = tl.load(x_ptrs, mask=mask)
    y, _ = activate(x.to(tl.float32), KIND, x.dtype == tl.float32)
    tl.store(y_ptrs, y.to(x.dtype), mask=mask)


@triton.jit
def _activate_back_at(dy_ptrs, x_ptrs, dx_ptrs, mask, KIND: tl.constexpr):
    dy = tl.load(dy_ptrs, mask=mask)
    x = tl.load(x_ptrs, mask=mask)
    _, slope = activate(x.to(tl.float32), KIND, x.dtype == tl.float32)
    tl.store(dx_ptrs, (dy.to(tl.float32) * slope).to(x.dtype), mask=mask)


@triton.jit
def _activation_kernel(x_ptr, y_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK  # n may pass 2**31
    place = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:  # without a mask whole vectors move, whatever n
        _activate_at(x_ptr + place, y_ptr + place, None, KIND)
    else:
        _activate_at(x_ptr + place, y_ptr + place, place < n, KIND)


@triton.jit
def _activation_rows_kernel(
    x_ptr, y_ptr, vectors, per_row, x_stride,
    KIND: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """For rows that do not follow one another in memory."""
    _, row, col, mask = vector_places(vectors, per_row, BLOCK, VECTOR, WIDE)
    _activate_at(x_ptr + row * x_stride * VECTOR + col, y_ptr + row * per_row * VECTOR + col, mask, KIND)


@triton.jit
def _activation_backward_kernel(dy_ptr, x_ptr, dx_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _activate_back_at(dy_ptr + place, x_ptr + place, dx_ptr + place, None, KIND)
    else:
        _activate_back_at(dy_ptr + place, x_ptr + place, dx_ptr + place, place < n, KIND)


@triton.jit
def _activation_rows_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, vectors, per_row, dy_stride, x_stride,
    KIND: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    _, row, col, mask = vector_places(vectors, per_row, BLOCK, VECTOR, WIDE)
    _activate_back_at(
        dy_ptr + row * dy_stride * VECTOR + col,
        x_ptr + row * x_stride * VECTOR + col,
        dx_ptr + row * per_row * VECTOR + col,
        mask,
        KIND,
    )


KERNELS = tuple(
    Kernel(jit=jit)
    for jit in (
        _activation_kernel,
        _activation_rows_kernel,
        _activation_backward_kernel,
        _activation_rows_backward_kernel,
    )
)


def plan_forward(x: torch.Tensor, kind: str) -> Plan:
    """The launch that activates x."""
    kernels = _activation_kernel, _activation_rows_kernel
    return plan_pointwise("activation", kernels, {"x": x}, "y", KIND=kind)


def plan_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> Plan:
    """The launch that gives dx = dy * the activation's slope at x."""
    check_alike(dy=dy, x=x)
    kernels = _activation_backward_kernel, _activation_rows_backward_kernel
    return plan_pointwise("activation_backward", kernels, {"dy": dy, "x": x}, "dx", KIND=kind)


def kind_of(approximate: str) -> str:
    """The kernels' word for what PyTorch calls `approximate`."""
    if approximate not in KINDS:
        raise BadInput(f"approximate={approximate!r} is not known: use one of {', '.join(map(repr, KINDS))}")
    return KINDS[approximate]


_gelu_backward = Registered(
    schema="gelu_backward(Tensor dy, Tensor x, str approximate) -> Tensor dx",
    plan=lambda dy, x, approximate: plan_backward(dy, x, kind_of(approximate)),
    fake=lambda dy, x, approximate: like(x),
)
_gelu = Registered(
    schema="gelu(Tensor x, str approximate) -> Tensor y",
    reference=gelu_reference,
    theirs="torch.nn.functional.gelu",
    why_torch=lambda x, approximate: why_torch(x),
    plan=lambda x, approximate: plan_forward(x, kind_of(approximate)),
    fake=lambda x, approximate: like(x),
    gradient=Gradient(by=_gelu_backward, saves=("x",), gives=("x",), options=("approximate",)),
)
_gelu_tanh = Registered(
    schema="gelu_tanh(Tensor x) -> Tensor y",
    reference=partial(gelu_reference, approximate="tanh"),
    theirs="torch.nn.functional.gelu",
    why_torch=why_torch,
    plan=partial(plan_forward, kind="gelu_tanh"),
    fake=like,
    gradient=Gradient(by=_gelu_backward, saves=("x",), gives=("x",), constants=("tanh",)),
)
_relu2_backward = Registered(
    schema="relu2_backward(Tensor dy, Tensor x) -> Tensor dx",
    plan=partial(plan_backward, kind="relu2"),
    fake=lambda dy, x: like(x),
)
_relu2 = Registered(
    schema="relu2(Tensor x) -> Tensor y",
    reference=relu2_reference,
    theirs="torch.relu, torch.square",
    why_torch=why_torch,
    plan=partial(plan_forward, kind="relu2"),
    fake=like,
    gradient=Gradient(by=_relu2_backward, saves=("x",), gives=("x",)),
)


def gelu(x: torch.Tensor, approximate: Approximate = "none") -> torch.Tensor:
    """x times the normal distribution up to x; `approximate` as torch.nn.functional.gelu has it."""
    kind_of(approximate)
    return _gelu.call(x, approximate)  # type: ignore[no-any-return]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """`gelu(x, approximate="tanh")`, as GPT-2 and Gemma have it."""
    return _gelu_tanh.call(x)  # type: ignore[no-any-return]


def relu2(x: torch.Tensor) -> torch.Tensor:
    """relu(x)²: what is negative becomes 0, the rest is squared."""
    return _relu2.call(x)  # type: ignore[no-any-return]


def gelu_backward(dy: torch.Tensor, x: torch.Tensor, approximate: Approximate = "none") -> Inputs:
    """Our kernel for the gradient of x, whether or not it wins."""
    return (_gelu_backward.by_kernels(dy, x, approximate),)


def relu2_backward(dy: torch.Tensor, x: torch.Tensor) -> Inputs:
    """The same for relu2."""
    return (_relu2_backward.by_kernels(dy, x),)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (random_rows(shape, dtype, device, seed, scale=2.0),)


def _liger_relu2(x: torch.Tensor) -> Thunk:
    return partial(peer("liger_kernel.ops.relu_squared", "LigerReLUSquaredFunction").apply, x)


_SHARED: dict[str, Any] = {
    "inputs": inputs,
    "cost": cost,
    "shapes": shapes_of((768, 1600, 4096, 11008, 14336, 50257), small=14336),
    "test_shapes": TEST_SHAPES,
}
GELU = Op(
    name="gelu",
    summary="x times the normal distribution up to x",
    reference=gelu_reference,
    call=gelu,
    plan=lambda x, approximate="none": _gelu.decide(x, approximate),
    providers={
        "sublight": Provider(
            launch=lambda x, approximate="none": _gelu.by_kernels(x, approximate),
            backward=gelu_backward,
            kernels=KERNELS,
        )
    },
    **_SHARED,
    library_args=lambda x: (x, "none"),
)
GELU_TANH = Op(
    name="gelu_tanh",
    summary="gelu by tanh: x times the sigmoid of a cubic in x",
    reference=partial(gelu_reference, approximate="tanh"),
    call=gelu_tanh,
    plan=_gelu_tanh.decide,
    providers={
        "sublight": Provider(
            launch=_gelu_tanh.by_kernels, backward=partial(gelu_backward, approximate="tanh"), kernels=KERNELS
        )
    },
    **_SHARED,
)
RELU2 = Op(
    name="relu2",
    summary="relu(x) squared",
    reference=relu2_reference,
    call=relu2,
    plan=_relu2.decide,
    providers={"sublight": Provider(launch=_relu2.by_kernels, backward=relu2_backward, kernels=KERNELS)},
    **_SHARED,
    peers={"liger": _liger_relu2},
)
