"""RMSNorm of every head of q and of k, then rotary position embedding, as Qwen3 has it; q and k are read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.rotary import qk_norm_rope as cost
from sublight.op import Op, Plan, Provider
from sublight.ops.kernels.pointwise import like
from sublight.ops.kernels.rows import generator_for, why_torch
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered
from sublight.ops.rotary import head_norm, rope, rotary
from sublight.ops.rotary.rotary import Pair, Style

EPS = 1e-6


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    eps: float = EPS,
    style: Style = "half",
    rotary_dim: int | None = None,
) -> Pair:
    q, k = F.rms_norm(q, q.shape[-1:], q_weight, eps), F.rms_norm(k, k.shape[-1:], k_weight, eps)
    return rope.reference(q, k, cos, sin, positions, style=style, rotary_dim=rotary_dim)


def _by_style(*args: Any) -> Pair:
    """`reference` with the arguments of the registered op."""
    *tensors, eps, rotary_dim, interleaved = args
    q, k, q_weight, k_weight, cos, sin, positions = tensors
    rotary.check(q, k, cos, sin, positions, rotary_dim)
    head_norm.check_weights(q, q_weight, k_weight)
    return reference(*tensors, eps=eps, style=rotary.style_of(interleaved), rotary_dim=rotary_dim)


def _why_torch(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, *_: Any,
) -> str:  # fmt: skip
    return rotary.why_not_ours(q, k, cos, sin) or why_torch(q, q_weight, k_weight)


def _backward_of_given(
    call: Callable[..., Any], dq: Any, dk: Any, q: torch.Tensor, k: torch.Tensor, *rest: Any
) -> tuple[Any, ...]:
    """The gradients, where one of the two that come is None, since nobody used that result."""
    given = torch.zeros_like(q) if dq is None else dq, torch.zeros_like(k) if dk is None else dk
    found = call(*given, q, k, *rest)
    return tuple(None if grad is None else x for grad, x in zip((dq, dk, dq, dk), found, strict=True))


_TENSORS = "Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, Tensor? positions"
_NAMES = ("q", "k", "q_weight", "k_weight", "cos", "sin", "positions")
_qk_norm_rope_backward = Registered(
    schema=f"qk_norm_rope_backward(Tensor dq_turned, Tensor dk_turned, {_TENSORS}, float eps, int rotary_dim,"
    " bool interleaved) -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)",
    plan=head_norm.plan_backward,
    fake=lambda dq, dk, q, k, q_weight, k_weight, *_: (rotary.like(q), rotary.like(k), like(q_weight), like(k_weight)),
)
_qk_norm_rope = Registered(
    schema=f"qk_norm_rope({_TENSORS}, float eps, int rotary_dim, bool interleaved)"
    " -> (Tensor q_turned, Tensor k_turned)",
    reference=_by_style,
    theirs="torch.nn.functional.rms_norm, then rope",
    why_torch=_why_torch,
    plan=head_norm.plan_forward,
    fake=lambda q, k, *_: (rotary.like(q), rotary.like(k)),
    gradient=Gradient(
        by=_qk_norm_rope_backward,
        partly=_backward_of_given,
        saves=_NAMES,
        gives=("q", "k", "q_weight", "k_weight"),
        options=("eps", "rotary_dim", "interleaved"),
    ),
)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    eps: float = EPS,
    style: Style = "half",
    rotary_dim: int | None = None,
) -> Pair:
    """Every head of q and k by its root mean square, times its weight (head_dim,), then `rope`, with its arguments."""
    how = _arguments(q, k, q_weight, k_weight, cos, sin, positions, eps=eps, style=style, rotary_dim=rotary_dim)
    return _qk_norm_rope.call(*how)  # type: ignore[no-any-return]


def plan(*args: Any, **how: Any) -> Plan:
    """What `qk_norm_rope` runs with these arguments, and why."""
    return _qk_norm_rope.decide(*_arguments(*args, **how))


def launch(*args: Any, **how: Any) -> Pair:
    """Our kernel with the arguments of `qk_norm_rope`, whether or not it wins."""
    return _qk_norm_rope.by_kernels(*_arguments(*args, **how))  # type: ignore[no-any-return]


def launch_backward(dq: torch.Tensor, dk: torch.Tensor, *args: Any, **how: Any) -> Inputs:
    """The gradients of q, k and the two weights, for the same arguments."""
    return _qk_norm_rope_backward.by_kernels(dq, dk, *_arguments(*args, **how))  # type: ignore[no-any-return]


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    eps: float = EPS,
    style: Style = "half",
    rotary_dim: int | None = None,
) -> tuple[Any, ...]:
    """The arguments of the registered op."""
    width = q.shape[-1] if rotary_dim is None else rotary_dim
    return q, k, q_weight, k_weight, cos, sin, positions, eps, width, rotary.is_interleaved(style)


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    q, k, cos, sin = rotary.random_inputs(shape, dtype, device, seed)
    generator, size, kind = generator_for(device, seed + 1_000_003), shape["head_dim"], getattr(torch, dtype)
    weights = (1 + torch.randn(size, generator=generator, device=device, dtype=kind) / 4 for _ in range(2))
    return q, k, *weights, cos, sin


QK_NORM_ROPE = Op(
    name="qk_norm_rope",
    summary="RMSNorm of each head of q and k, then rotary position embedding",
    reference=reference,
    call=qk_norm_rope,
    plan=plan,
    providers={"sublight": Provider(launch=launch, backward=launch_backward, kernels=head_norm.KERNELS)},
    inputs=inputs,
    cost=cost,
    shapes=rotary.SHAPES,
    test_shapes=rotary.TEST_SHAPES,
    wrt=(0, 1, 2, 3),
    batch="batch",
    library_args=lambda *inputs: (*inputs, None, EPS, inputs[0].shape[-1], False),
)
