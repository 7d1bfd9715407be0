"""Gated activations: y = act(gate) * up, with silu (swiglu) or gelu (geglu); read gate and up, write y.

Gate and up may be the two halves of one tensor, as one matrix product gives them: rows that lie apart are read where
they are. Given as one tensor, the gradient too is written as one, where slicing would have it put together again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from sublight.backend.jit import tl, triton
from sublight.correct import Call, Inputs
from sublight.cost import Shape
from sublight.cost.pointwise import gated_activation as cost
from sublight.errors import BadInput
from sublight.op import Buffer, Kernel, Op, Plan, Provider
from sublight.ops.kernels.pointwise import (
    TEST_SHAPES,
    check_alike,
    like,
    plan_pointwise,
    shapes_of,
    vector_places,
)
from sublight.ops.kernels.rows import random_rows, why_torch
from sublight.ops.pointwise.activation import Approximate, activate, kind_of
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered, peer
from sublight.timing import Thunk

Gate = Literal["silu", "none", "tanh"]  # of which the last two are what PyTorch calls gelu's `approximate`


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def geglu_reference(gate: torch.Tensor, up: torch.Tensor, approximate: Approximate = "tanh") -> torch.Tensor:
    return F.gelu(gate, approximate=approximate) * up


def reference(gate: torch.Tensor, up: torch.Tensor, by: Gate) -> torch.Tensor:
    return swiglu_reference(gate, up) if by == "silu" else geglu_reference(gate, up, by)


@triton.jit
def _gate_at(gate_ptrs, up_ptrs, y_ptrs, mask, KIND: tl.constexpr):
    gate = tl.load(gate_ptrs, mask=mask)
    up = tl.load(up_ptrs, mask=mask)
    value, _ = activate(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    tl.store(y_ptrs, (value * up.to(tl.float32)).to(gate.dtype), mask=mask)


@triton.jit
def _gated_kernel(gate_ptr, up_ptr, y_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK  # n may pass 2**31
    place = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:  # without a mask whole vectors move, whatever n
        _gate_at(gate_ptr + place, up_ptr + place, y_ptr + place, None, KIND)
    else:
        _gate_at(gate_ptr + place, up_ptr + place, y_ptr + place, place < n, KIND)


@triton.jit
def _gated_rows_kernel(
    gate_ptr, up_ptr, y_ptr, vectors, per_row, gate_stride, up_stride,
    KIND: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """For rows that do not follow one another in memory."""
    _, row, col, mask = vector_places(vectors, per_row, BLOCK, VECTOR, WIDE)
    _gate_at(
        gate_ptr + row * gate_stride * VECTOR + col,
        up_ptr + row * up_stride * VECTOR + col,
        y_ptr + row * per_row * VECTOR + col,
        mask,
        KIND,
    )


def plan_forward(gate: torch.Tensor, up: torch.Tensor, by: Gate) -> Plan:
    """The launch that gives y."""
    check_alike(gate=gate, up=up)
    return plan_pointwise("gated", (_gated_kernel, _gated_rows_kernel), {"gate": gate, "up": up}, "y", KIND=_kind(by))


def plan_halves(x: torch.Tensor, by: Gate) -> Plan:
    """The same for the two halves of one tensor, which are views of it."""
    return plan_forward(*halves(x), by)


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(…, 2n) as gate and up, each (…, n): views."""
    if x.dim() == 0 or x.shape[-1] % 2:
        raise BadInput(f"gate and up in one tensor need an even number of columns, not shape {tuple(x.shape)}")
    gate, up = x.chunk(2, -1)
    return gate, up


def _kind(by: Gate) -> str:
    """The kernels' word for a gate."""
    return by if by == "silu" else kind_of(by)


@triton.jit
def _gate_back_at(dy_ptrs, gate_ptrs, up_ptrs, dgate_ptrs, dup_ptrs, mask, KIND: tl.constexpr, AGAIN: tl.constexpr):
    """With AGAIN, y is written where dy was: a thread writes what it alone has read."""
    dy = tl.load(dy_ptrs, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptrs, mask=mask)
    up = tl.load(up_ptrs, mask=mask).to(tl.float32)
    value, slope = activate(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    tl.store(dgate_ptrs, (dy * up * slope).to(gate.dtype), mask=mask)
    tl.store(dup_ptrs, (dy * value).to(gate.dtype), mask=mask)
    if AGAIN:
        tl.store(dy_ptrs, (value * up).to(gate.dtype), mask=mask)


@triton.jit
def _gated_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, KIND: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _gate_back_at(dy_ptr + at, gate_ptr + at, up_ptr + at, dgate_ptr + at, dup_ptr + at, None, KIND, AGAIN)
    else:
        _gate_back_at(dy_ptr + at, gate_ptr + at, up_ptr + at, dgate_ptr + at, dup_ptr + at, at < n, KIND, AGAIN)


@triton.jit
def _gated_rows_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, vectors, per_row, dy_stride, gate_stride, up_stride, out_stride,
    KIND: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    _, row, col, mask = vector_places(vectors, per_row, BLOCK, VECTOR, WIDE)
    out = row * out_stride * VECTOR + col
    _gate_back_at(
        dy_ptr + row * dy_stride * VECTOR + col,
        gate_ptr + row * gate_stride * VECTOR + col,
        up_ptr + row * up_stride * VECTOR + col,
        dgate_ptr + out,
        dup_ptr + out,
        mask,
        KIND,
        AGAIN,
    )


def plan_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, by: Gate, *, again: bool = False, apart: int | None = None
) -> Plan:
    """The launch that gives the gradients of gate and up; act(gate) is computed again rather than kept.

    With `again`, dy becomes y, for whoever needs that in his own backward pass and does not want to keep it till then.
    """
    check_alike(dy=dy, gate=gate, up=up)
    if again and not dy.is_contiguous():
        raise BadInput(f"dy of strides {dy.stride()} cannot become y where it lies: make it contiguous")
    kernels, apart = (_gated_backward_kernel, _gated_rows_backward_kernel), gate.shape[-1] if apart is None else apart
    reads = {"dy": dy, "gate": gate, "up": up}
    return plan_pointwise("gated_backward", kernels, reads, "dgate dup", apart=apart, KIND=_kind(by), AGAIN=again)


def plan_halves_backward(dy: torch.Tensor, x: torch.Tensor, by: Gate, *, again: bool = False) -> Plan:
    """The same for a tensor that holds gate and up: its gradient is in one piece like itself."""
    plan = plan_backward(dy, *halves(x), by, again=again, apart=x.shape[-1])
    return replace(plan, buffers={"dx": Buffer(shape=tuple(x.shape), dtype=x.dtype)}, outputs=("dx",))


KERNELS = tuple(
    Kernel(jit=jit) for jit in (_gated_kernel, _gated_rows_kernel, _gated_backward_kernel, _gated_rows_backward_kernel)
)


def _launch_halves(plan: Plan, x: torch.Tensor, by: Gate) -> torch.Tensor:
    y = torch.empty(plan.buffers["y"].shape, dtype=x.dtype, device=x.device)
    plan.steps[0](*_read(plan, x), y)
    return y


def _launch_halves_backward(plan: Plan, dy: torch.Tensor, x: torch.Tensor, by: Gate) -> torch.Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan.steps[0](dy.contiguous() if "dy" in plan.copies else dy, *_read(plan, x), *halves(dx))
    return dx


def _read(plan: Plan, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves as the kernels read them."""
    gate, up = halves(x)
    return (gate.contiguous(), up.contiguous()) if "gate" in plan.copies else (gate, up)


def why_pytorch(gate: torch.Tensor, up: torch.Tensor | None) -> str:
    """Why a call goes to PyTorch; empty where our kernels take it."""
    if up is None:
        return why_torch(gate)
    if up.shape != gate.shape:
        return "the shapes differ: PyTorch broadcasts"
    return why_torch(gate, up)


_gated_backward = Registered(
    schema="gated_backward(Tensor dy, Tensor gate, Tensor up, str by) -> (Tensor dgate, Tensor dup)",
    plan=plan_backward,
    fake=lambda dy, gate, up, by: (like(gate), like(up)),
)
gated_backward_again = Registered(
    schema="gated_backward_again(Tensor(a!) dy, Tensor gate, Tensor up, str by) -> (Tensor dgate, Tensor dup)",
    plan=partial(plan_backward, again=True),
    fake=lambda dy, gate, up, by: (like(gate), like(up)),
)
_swiglu = Registered(
    schema="swiglu(Tensor gate, Tensor up) -> Tensor y",
    reference=swiglu_reference,
    theirs="torch.nn.functional.silu, torch.mul",
    why_torch=why_pytorch,
    plan=partial(plan_forward, by="silu"),
    fake=lambda gate, up: like(gate),
    gradient=Gradient(
        by=_gated_backward,
        saves=("gate", "up"),
        gives=("gate", "up"),
        constants=("silu",),
    ),
)
_geglu = Registered(
    schema="geglu(Tensor gate, Tensor up, str approximate) -> Tensor y",
    reference=geglu_reference,
    theirs="torch.nn.functional.gelu, torch.mul",
    why_torch=lambda gate, up, approximate: why_pytorch(gate, up),
    plan=plan_forward,
    fake=lambda gate, up, approximate: like(gate),
    gradient=Gradient(by=_gated_backward, saves=("gate", "up"), gives=("gate", "up"), options=("approximate",)),
)
_halves_backward = Registered(
    schema="gated_halves_backward(Tensor dy, Tensor x, str by) -> Tensor dx",
    plan=plan_halves_backward,
    launch=_launch_halves_backward,
    fake=lambda dy, x, by: like(x),
)
halves_backward_again = Registered(
    schema="gated_halves_backward_again(Tensor(a!) dy, Tensor x, str by) -> Tensor dx",
    plan=partial(plan_halves_backward, again=True),
    launch=_launch_halves_backward,
    fake=lambda dy, x, by: like(x),
)
_halves = Registered(
    schema="gated_halves(Tensor x, str by) -> Tensor y",
    reference=lambda x, by: reference(*halves(x), by),
    theirs="torch.nn.functional.silu or gelu, torch.mul",
    why_torch=lambda x, by: why_torch(x),
    plan=plan_halves,
    launch=_launch_halves,
    fake=lambda x, by: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    gradient=Gradient(by=_halves_backward, saves=("x",), gives=("x",), options=("by",)),
)


def gated(gate: torch.Tensor, up: torch.Tensor | None, by: Gate) -> torch.Tensor:
    """act(gate) * up by the kind of its gate; one tensor alone is taken as both, gate in the first half of its
    columns."""
    if up is None:
        halves(gate)  # or its complaint
        return _halves.call(gate, by)  # type: ignore[no-any-return]
    return _swiglu.call(gate, up) if by == "silu" else _geglu.call(gate, up, by)  # type: ignore[no-any-return]


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up; one tensor alone is taken as both, gate in the first half of its columns."""
    return gated(gate, up, "silu")


def geglu(gate: torch.Tensor, up: torch.Tensor | None = None, approximate: Approximate = "tanh") -> torch.Tensor:
    """gelu(gate) * up, gelu by tanh as Gemma has it by default; one tensor alone is taken as both halves."""
    kind_of(approximate)
    return gated(gate, up, approximate)


def plan(gate: torch.Tensor, up: torch.Tensor | None, by: Gate) -> Plan:
    """What `gated(gate, up, by)` runs, and why."""
    if up is None:
        return _halves.decide(gate, by)
    return _swiglu.decide(gate, up) if by == "silu" else _geglu.decide(gate, up, by)


def launch(gate: torch.Tensor, up: torch.Tensor, by: Gate) -> torch.Tensor:
    """Our kernel, whether or not it wins."""
    return (  # type: ignore[no-any-return]
        _swiglu.by_kernels(gate, up) if by == "silu" else _geglu.by_kernels(gate, up, by)
    )


def launch_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, by: Gate, again: bool = False) -> Inputs:
    """The gradients of gate and up; with `again`, dy becomes y."""
    op = gated_backward_again if again else _gated_backward
    return op.by_kernels(dy, gate, up, by)  # type: ignore[no-any-return]


def launch_halves_backward(dy: torch.Tensor, x: torch.Tensor, by: Gate, again: bool = False) -> torch.Tensor:
    """The gradient of a tensor that holds gate and up."""
    op = halves_backward_again if again else _halves_backward
    return op.by_kernels(dy, x, by)  # type: ignore[no-any-return]


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return random_rows(shape, dtype, device, seed, scale=2.0), random_rows(shape, dtype, device, seed + 1_000_003)


def _liger(module: str, name: str) -> Callable[..., Thunk]:
    """On copies: Liger's backward pass writes the gradients over gate and up."""
    return lambda gate, up: partial(peer(f"liger_kernel.ops.{module}", name).apply, gate.clone(), up.clone())


def _variants(by: Gate) -> tuple[Call, ...]:
    """The backward pass that makes y again, of gate and up apart and of halves; what is in dy does not matter here."""
    return (
        lambda gate, up: launch_backward(torch.zeros_like(gate), gate, up, by, again=True),
        lambda gate, up: launch_halves_backward(torch.zeros_like(gate), torch.cat((gate, up), -1), by, again=True),
    )


_SHARED: dict[str, Any] = {
    "inputs": inputs,
    "cost": cost,
    "shapes": shapes_of((1600, 2560, 4096, 5120, 11008, 12288, 14336), small=14336),
    "test_shapes": TEST_SHAPES,
}
SWIGLU = Op(
    name="swiglu",
    summary="silu(gate) * up",
    reference=swiglu_reference,
    call=swiglu,
    plan=lambda gate, up=None: plan(gate, up, "silu"),
    providers={
        "sublight": Provider(
            launch=partial(launch, by="silu"),
            backward=partial(launch_backward, by="silu"),
            kernels=KERNELS,
            variants=_variants("silu"),
        )
    },
    **_SHARED,
    peers={"liger": _liger("swiglu", "LigerSiLUMulFunction")},
)
GEGLU = Op(
    name="geglu",
    summary="gelu(gate) * up, gelu by tanh",
    reference=geglu_reference,
    call=geglu,
    plan=lambda gate, up=None, approximate="tanh": plan(gate, up, approximate),
    providers={
        "sublight": Provider(
            launch=partial(launch, by="tanh"),
            backward=partial(launch_backward, by="tanh"),
            kernels=KERNELS,
            variants=(*_variants("tanh"), *_variants("none")),
        )
    },
    **_SHARED,
    peers={"liger": _liger("geglu", "LigerGELUMulFunction")},
    library_args=lambda gate, up: (gate, up, "tanh"),
)
