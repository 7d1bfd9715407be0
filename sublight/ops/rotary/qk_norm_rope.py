"""RMSNorm of every head of q and of k, then rotary position embedding, as Qwen3 has it; q and k are read once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.rotary import qk_norm_rope as cost
from sublight.errors import BadInput
from sublight.op import Choice, Op
from sublight.ops.kernels.rows import generator_for, why_torch
from sublight.ops.record.library import LIBRARY
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


def launch(
    *inputs: torch.Tensor,
    positions: torch.Tensor | None = None,
    eps: float = EPS,
    style: Style = "half",
    rotary_dim: int | None = None,
) -> Pair:
    """Our forward kernel, whatever `choose` would say."""
    q, k, q_weight, k_weight, cos, sin = inputs
    width = rotary.check(q, k, cos, sin, positions, style, rotary_dim)
    return head_norm.forward(q, k, q_weight, k_weight, cos, sin, positions, eps, width, style == "interleaved")


def launch_backward(*grads_and_inputs: torch.Tensor) -> Inputs:
    dq, dk, q, k, q_weight, k_weight, cos, sin = grads_and_inputs
    return head_norm.backward(dq, dk, q, k, q_weight, k_weight, cos, sin, None, EPS, q.shape[-1], False)


def _why_torch(q: torch.Tensor, k: torch.Tensor, weights: Pair, cos: torch.Tensor, sin: torch.Tensor) -> str:
    return rotary.why_not_ours(q, k, cos, sin) or why_torch(q, *weights)


def choose(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, *_: Any, **_options: Any,
) -> Choice:  # fmt: skip
    """What `qk_norm_rope(q, k, q_weight, k_weight, cos, sin)` runs, and why."""
    if reason := _why_torch(q, k, (q_weight, k_weight), cos, sin):
        return Choice(provider="torch", kernel="torch.nn.functional.rms_norm, then rope", reason=reason)
    return Choice(provider="sublight", kernel="_qk_norm_rope_kernel", reason="q and k read once and written once")


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
    width = rotary.check(q, k, cos, sin, positions, style, rotary_dim)
    for weight in (q_weight, k_weight):
        if weight.shape != q.shape[-1:] or weight.device != q.device:
            told = f"{tuple(weight.shape)} on {weight.device}"
            raise BadInput(f"the weights must be ({q.shape[-1]},), a head's width, on {q.device}, not {told}")
    if _why_torch(q, k, (q_weight, k_weight), cos, sin):
        return reference(q, k, q_weight, k_weight, cos, sin, positions, eps=eps, style=style, rotary_dim=width)
    how = (eps, width, style == "interleaved")
    return _qk_norm_rope(q, k, q_weight, k_weight, cos, sin, positions, *how)  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.how = inputs[7:]


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_qk_norm_rope_backward(dq, dk, *ctx.saved_tensors, *ctx.how), *[None] * 6


def _cpu(*args: Any) -> Pair:
    *tensors, eps, rotary_dim, interleaved = args
    style: Style = "interleaved" if interleaved else "half"
    turned = reference(*tensors, eps=eps, style=style, rotary_dim=rotary_dim)
    return rotary.like(args[0]).copy_(turned[0]), rotary.like(args[1]).copy_(turned[1])


def _cpu_backward(
    dq: torch.Tensor, dk: torch.Tensor, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor,
    k_weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None,
    eps: float, rotary_dim: int, interleaved: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    style: Style = "interleaved" if interleaved else "half"
    grads = rope.reference(dq.float(), dk.float(), cos, -sin, positions, style=style, rotary_dim=rotary_dim)
    found = []
    for g, x, weight in zip(grads, (q, k), (q_weight, k_weight), strict=True):
        rstd = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        normal, along = x.float() * rstd, g * weight.float()
        dx = (along - normal * (along * normal).mean(-1, keepdim=True)) * rstd
        found.append((rotary.like(x).copy_(dx), (g * normal).sum((0, 1, 2)).to(weight.dtype)))
    return found[0][0], found[1][0], found[0][1], found[1][1]


_TENSORS = "Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, Tensor? positions"
_qk_norm_rope = LIBRARY.op(
    f"qk_norm_rope({_TENSORS}, float eps, int rotary_dim, bool interleaved) -> (Tensor, Tensor)",
    cpu=_cpu,
    cuda=head_norm.forward,
    fake=lambda q, k, *_: (rotary.like(q), rotary.like(k)),
    backward=_backward,
    setup_context=_setup_context,
)
_qk_norm_rope_backward = LIBRARY.op(
    f"qk_norm_rope_backward(Tensor dq, Tensor dk, {_TENSORS}, float eps, int rotary_dim, bool interleaved)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu_backward,
    cuda=head_norm.backward,
    fake=lambda dq, dk, q, k, *more: (rotary.like(q), rotary.like(k), *map(torch.empty_like, more[:2])),
)


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
    launch=launch,
    launch_backward=launch_backward,
    choose=choose,
    inputs=inputs,
    cost=cost,
    kernels=head_norm.KERNELS,
    shapes=rotary.SHAPES,
    test_shapes=rotary.TEST_SHAPES,
    wrt=(0, 1, 2, 3),
    library_args=lambda *inputs: (*inputs, None, EPS, inputs[0].shape[-1], False),
)
