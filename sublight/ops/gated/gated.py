"""Gated activations: y = act(gate) * up, with silu (swiglu) or gelu (geglu); read gate and up, write y.

Gate and up may be the two halves of one tensor, as one matrix product gives them: rows that lie apart are read where
they are. Given as one tensor, the gradient too is written as one, where slicing would have it put together again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from sublight.backend.jit import tl, triton
from sublight.correct import Call, Inputs
from sublight.cost import Shape
from sublight.cost.pointwise import gated_activation as cost
from sublight.errors import BadInput
from sublight.op import Choice, Kernel, Op
from sublight.ops.kernels.pointwise import (
    TEST_SHAPES,
    check_alike,
    grid,
    is_wide,
    shapes_of,
    tile_of,
    vector_of,
    vector_places,
)
from sublight.ops.kernels.rows import as_rows, random_rows, why_torch
from sublight.ops.pointwise.activation import Approximate, activate, kind_of
from sublight.ops.record.library import LIBRARY, peer
from sublight.timing import Thunk

Gate = Literal["silu", "none", "tanh"]  # of which the last two are what PyTorch calls gelu's `approximate`


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def geglu_reference(gate: torch.Tensor, up: torch.Tensor, approximate: Approximate = "tanh") -> torch.Tensor:
    return F.gelu(gate, approximate=approximate) * up


@triton.jit
def _gate_at(gate_ptrs, up_ptrs, y_ptrs, mask, KIND: tl.constexpr):
    gate = tl.load(gate_ptrs, mask=mask)
    up = tl.load(up_ptrs, mask=mask)
    value, _ = activate(gate.to(tl.float32), KIND, gate.dtype == tl.float32)
    tl.store(y_ptrs, (value * up.to(tl.float32)).to(gate.dtype), mask=mask)


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


KERNELS = tuple(
    Kernel(jit=jit) for jit in (_gated_kernel, _gated_rows_kernel, _gated_backward_kernel, _gated_rows_backward_kernel)
)


def launch(gate: torch.Tensor, up: torch.Tensor, by: Gate) -> torch.Tensor:
    """Our kernel, whatever `choose` would say."""
    check_alike(gate=gate, up=up)
    kind = _kind(by)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    tile = tile_of("gated", gate)
    if gate.is_contiguous() and up.is_contiguous():
        n = gate.numel()
        _gated_kernel[grid(n, tile)](gate, up, y, n, KIND=kind, BLOCK=tile.block, **tile.options())
        return y
    gate2, up2 = as_rows(gate), as_rows(up)
    rows, cols = gate2.shape
    vector = vector_of(gate2, up2)
    vectors, per_row = rows * cols // vector, cols // vector
    _gated_rows_kernel[grid(rows * cols, tile)](
        gate2, up2, y, vectors, per_row, gate2.stride(0) // vector, up2.stride(0) // vector,
        KIND=kind, BLOCK=tile.block, VECTOR=vector, WIDE=is_wide(vectors), **tile.options(),
    )  # fmt: skip
    return y


def launch_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, by: Gate, again: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up; act(gate) is computed again rather than kept.

    With `again`, dy becomes y, for whoever needs that in his own backward pass and does not want to keep it till then.
    """
    dgate, dup = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    _launch_backward(dy, gate, up, dgate, dup, by, again)
    return dgate, dup


def launch_halves_backward(dy: torch.Tensor, x: torch.Tensor, by: Gate, again: bool = False) -> torch.Tensor:
    """The gradient of a tensor that holds gate and up, in one piece like itself."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_backward(dy, *halves(x), *halves(dx), by, again)
    return dx


def _launch_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    dgate: torch.Tensor,
    dup: torch.Tensor,
    by: Gate,
    again: bool,
) -> None:
    check_alike(dy=dy, gate=gate, up=up)
    if again and not dy.is_contiguous():
        raise BadInput(f"dy of strides {dy.stride()} cannot become y where it lies: make it contiguous")
    tile, kind = tile_of("gated_backward", gate), _kind(by)
    if all(x.is_contiguous() for x in (dy, gate, up, dgate)):
        n = gate.numel()
        _gated_backward_kernel[grid(n, tile)](
            dy, gate, up, dgate, dup, n, KIND=kind, AGAIN=again, BLOCK=tile.block, **tile.options()
        )  # fmt: skip
        return
    dy2, gate2, up2 = as_rows(dy), as_rows(gate), as_rows(up)
    dgate2, dup2 = (x.view(-1, x.shape[-1]) for x in (dgate, dup))  # never a copy: they are written into
    rows, cols = gate2.shape
    vector = vector_of(dy2, gate2, up2, dgate2)
    vectors, per_row = rows * cols // vector, cols // vector
    strides = (x.stride(0) // vector for x in (dy2, gate2, up2, dgate2))
    _gated_rows_backward_kernel[grid(rows * cols, tile)](
        dy2, gate2, up2, dgate2, dup2, vectors, per_row, *strides,
        KIND=kind, AGAIN=again, BLOCK=tile.block, VECTOR=vector, WIDE=is_wide(vectors), **tile.options(),
    )  # fmt: skip


def _kind(by: Gate) -> str:
    return by if by == "silu" else kind_of(by)


def why_pytorch(gate: torch.Tensor, up: torch.Tensor | None) -> str:
    if up is None:
        return why_torch(gate)
    if up.shape != gate.shape:
        return "the shapes differ: PyTorch broadcasts"
    return why_torch(gate, up)


def _choose(gate: torch.Tensor, up: torch.Tensor | None, theirs: str) -> Choice:
    if reason := why_pytorch(gate, up):
        return Choice(provider="torch", kernel=theirs, reason=reason)
    if up is not None and gate.is_contiguous() and up.is_contiguous():
        return Choice(provider="sublight", kernel="_gated_kernel", reason="in one piece: one long row")
    return Choice(provider="sublight", kernel="_gated_rows_kernel", reason="rows apart in memory, not copied")


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(…, 2n) as gate and up, each (…, n): views."""
    if x.dim() == 0 or x.shape[-1] % 2:
        raise BadInput(f"gate and up in one tensor need an even number of columns, not shape {tuple(x.shape)}")
    gate, up = x.chunk(2, -1)
    return gate, up


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up; one tensor alone is taken as both, gate in the first half of its columns."""
    if up is None:
        first, second = halves(gate)
        return swiglu_reference(first, second) if why_torch(gate) else _halves(gate, "silu")
    return swiglu_reference(gate, up) if why_pytorch(gate, up) else _swiglu(gate, up)


def geglu(gate: torch.Tensor, up: torch.Tensor | None = None, approximate: Approximate = "tanh") -> torch.Tensor:
    """gelu(gate) * up, gelu by tanh as Gemma has it unless told; one tensor alone is taken as both halves."""
    kind_of(approximate)
    if up is None:
        first, second = halves(gate)
        return geglu_reference(first, second, approximate) if why_torch(gate) else _halves(gate, approximate)
    return geglu_reference(gate, up, approximate) if why_pytorch(gate, up) else _geglu(gate, up, approximate)


def reference(gate: torch.Tensor, up: torch.Tensor, by: Gate) -> torch.Tensor:
    return swiglu_reference(gate, up) if by == "silu" else geglu_reference(gate, up, by)


def reference_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, by: Gate
) -> tuple[torch.Tensor, torch.Tensor]:
    if by == "silu":
        dgate, value = _silu_backward(dy * up, gate), F.silu(gate)
    else:
        dgate, value = torch.ops.aten.gelu_backward(dy * up, gate, approximate=by), F.gelu(gate, approximate=by)
    return dgate.contiguous(), (dy * value).contiguous()


def _silu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(dy, x)  # type: ignore[no-any-return]
    share = torch.sigmoid(x)  # PyTorch's kernel has no gradient of its own, as it has for gelu
    return dy * share * (1 + x * (1 - share))


def _reference_backward_again(dy: torch.Tensor, *gated: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = reference_backward(dy, *gated)
    dy.copy_(reference(*gated))
    return found


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.by = inputs[-1] if isinstance(inputs[-1], str) else "silu"


_gated_backward = LIBRARY.op(
    "gated_backward(Tensor dy, Tensor gate, Tensor up, str by) -> (Tensor, Tensor)",
    cpu=reference_backward,
    cuda=launch_backward,
    fake=lambda dy, gate, up, by: (_like(gate), _like(up)),
)
gated_backward_again = LIBRARY.op(
    "gated_backward_again(Tensor(a!) dy, Tensor gate, Tensor up, str by) -> (Tensor, Tensor)",
    cpu=_reference_backward_again,
    cuda=partial(launch_backward, again=True),
    fake=lambda dy, gate, up, by: (_like(gate), _like(up)),
)
_swiglu = LIBRARY.op(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    cpu=lambda gate, up: swiglu_reference(gate, up).contiguous(),
    cuda=partial(launch, by="silu"),
    fake=lambda gate, up: _like(gate),
    backward=lambda ctx, dy: _gated_backward(dy, *ctx.saved_tensors, "silu"),
    setup_context=_setup_context,
)
_geglu = LIBRARY.op(
    "geglu(Tensor gate, Tensor up, str approximate) -> Tensor",
    cpu=lambda gate, up, approximate: geglu_reference(gate, up, approximate).contiguous(),
    cuda=launch,
    fake=lambda gate, up, approximate: _like(gate),
    backward=lambda ctx, dy: (*_gated_backward(dy, *ctx.saved_tensors, ctx.by), None),
    setup_context=_setup_context,
)
_halves_backward = LIBRARY.op(
    "gated_halves_backward(Tensor dy, Tensor x, str by) -> Tensor",
    cpu=lambda dy, x, by: torch.cat(reference_backward(dy, *halves(x), by), -1),
    cuda=launch_halves_backward,
    fake=lambda dy, x, by: _like(x),
)
halves_backward_again = LIBRARY.op(
    "gated_halves_backward_again(Tensor(a!) dy, Tensor x, str by) -> Tensor",
    cpu=lambda dy, x, by: torch.cat(_reference_backward_again(dy, *halves(x), by), -1),
    cuda=partial(launch_halves_backward, again=True),
    fake=lambda dy, x, by: _like(x),
)
_halves = LIBRARY.op(
    "gated_halves(Tensor x, str by) -> Tensor",
    cpu=lambda x, by: reference(*halves(x), by).contiguous(),
    cuda=lambda x, by: launch(*halves(x), by),
    fake=lambda x, by: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    backward=lambda ctx, dy: (_halves_backward(dy, *ctx.saved_tensors, ctx.by), None),
    setup_context=_setup_context,
)


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
    "kernels": KERNELS,
    "shapes": shapes_of((1600, 2560, 4096, 5120, 11008, 12288, 14336), small=14336),
    "test_shapes": TEST_SHAPES,
}
SWIGLU = Op(
    name="swiglu",
    summary="silu(gate) * up",
    reference=swiglu_reference,
    call=swiglu,
    launch=partial(launch, by="silu"),
    launch_backward=partial(launch_backward, by="silu"),
    choose=lambda gate, up=None: _choose(gate, up, "torch.nn.functional.silu, torch.mul"),
    **_SHARED,
    variants=_variants("silu"),
    peers={"liger": _liger("swiglu", "LigerSiLUMulFunction")},
)
GEGLU = Op(
    name="geglu",
    summary="gelu(gate) * up, gelu by tanh",
    reference=geglu_reference,
    call=geglu,
    launch=partial(launch, by="tanh"),
    launch_backward=partial(launch_backward, by="tanh"),
    choose=lambda gate, up=None, approximate="tanh": _choose(gate, up, "torch.nn.functional.gelu, torch.mul"),
    **_SHARED,
    variants=(*_variants("tanh"), *_variants("none")),
    peers={"liger": _liger("geglu", "LigerGELUMulFunction")},
    library_args=lambda gate, up: (gate, up, "tanh"),
)
