"""The ladder of attention: its steps, what each takes, and which one a call goes to.

`naive` passes every score through memory; `online` keeps a running maximum and sum instead; `flash` is the same with
tiles that fill a GPU, `hopper` the same once more in one GPU's own terms. PyTorch's fused attention (cuDNN, flash 2) is
the peer: where ours was not timed to be faster a call goes there, and a step of the ladder runs where it is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sublight.backend.device import facts_here
from sublight.backend.state import constant_when_compiled
from sublight.errors import BadInput, nearest
from sublight.op import Kernel, Plan
from sublight.ops.attention import (
    delta,
    flash,
    flash_backward,
    hopper,
    hopper_backward,
    keys_backward,
    naive,
    online,
    queries_backward,
)
from sublight.ops.attention.extended import why_no_way
from sublight.ops.attention.extras import NONE, Extras
from sublight.ops.attention.masks import Mask
from sublight.ops.record.call import wants_grad

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NOT_TIMED = "our kernels are timed on Hopper in 16 bits alone: name one, as provider='flash'"
CUDNN = "cuDNN's: on an H200 ours are not faster at such sizes, or not timed; provider='hopper' takes ours"
CUDNN_TRAINING = "cuDNN's: on an H200 ours with a gradient reach 0.94 to 1.01 of it; provider='hopper' takes ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one step of the ladder plans both passes."""

    forward: Callable[..., Plan]
    backward: Callable[..., Plan]
    kernels: tuple[Kernel, ...]
    summary: str
    why_not: Callable[..., str] = lambda *args: ""  # beside what none of ours takes


BLACKWELL_STACK = "sm_100's assembler keeps some words on the stack with half of the registers free"
BACKWARD_KERNELS = (
    Kernel(jit=delta._delta_kernel, spills=BLACKWELL_STACK),
    Kernel(
        jit=keys_backward._keys_backward_kernel,
        spills="heads of 256, shared ones of 128: two gradients fill the registers; not yet timed beside smaller tiles",
    ),
    Kernel(
        jit=queries_backward._queries_backward_kernel,
        spills="some words, in fp32 with heads of 256 and where every extra comes at once; not yet timed otherwise",
    ),
)
WAYS = {
    "naive": Way(
        forward=naive.plan,
        backward=naive.plan_backward,
        kernels=(
            Kernel(jit=naive._product_kernel),
            Kernel(jit=naive._softmax_rows_kernel),
            Kernel(jit=naive._softmax_rows_backward_kernel),
        ),
        summary="scores and weights through memory, q_len x kv_len numbers a head",
    ),
    "online": Way(
        forward=online.plan,
        backward=flash_backward.plan_backward,
        kernels=(Kernel(jit=online._online_kernel, spills=BLACKWELL_STACK), *BACKWARD_KERNELS),
        summary="one pass over the keys: a running maximum and sum take the place of the scores",
    ),
    "hopper": Way(
        forward=hopper.plan,
        backward=hopper_backward.plan,
        kernels=(
            Kernel(jit=hopper._hopper_kernel, targets=(90,)),
            Kernel(jit=hopper_backward._begin_kernel),
            Kernel(jit=hopper_backward._backward_kernel, targets=(90,), spills="some words around its loops"),
            Kernel(jit=hopper_backward._end_kernel),
            *BACKWARD_KERNELS,
        ),
        summary="written for one GPU: a warp that copies, two warpgroups, softmax under the products",
        why_not=hopper.why_not,
    ),
    "flash": Way(  # the last takes every input
        forward=flash.plan,
        backward=flash_backward.plan_backward,
        kernels=(Kernel(jit=flash._flash_kernel), *BACKWARD_KERNELS, Kernel(jit=delta._sinks_backward_kernel)),
        summary="hidden blocks are skipped, whole ones need no mask, tiles fill the tensor cores",
    ),
}


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(max(1, q.shape[3])) if scale is None else scale


def check_tensors(**tensors: Any) -> None:
    """Refuse arguments that should be tensors and are not."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise BadInput(f"{name} is {type(x).__name__}: use a torch.Tensor")


def widened(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """fp8 as bf16, which holds each of its values: weights in fp8 would be off by more than PyTorch's are."""
    return tuple(x.to(torch.bfloat16) if x.dtype in FP8 else x for x in tensors)


def check_numbers(window: Any, softcap: Any, scale: Any) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, int | torch.SymInt) or window < 1):
        raise BadInput(f"window {window!r}: use a whole number of keys from 1 on, or None for all")
    if not isinstance(softcap, int | float) or not 0 <= softcap < math.inf:
        raise BadInput(f"softcap {softcap!r}: use a positive number, or leave it out")
    if scale is not None and (not isinstance(scale, int | float | torch.SymFloat) or not -math.inf < scale < math.inf):
        raise BadInput(f"scale {scale!r}: use a number, or None for 1 / sqrt(head_dim)")


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, softcap: float, provider: str) -> None:
    """Before any launch: what no implementation could make sense of."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise BadInput(f"{name} has {x.dim()} dimensions: use 4, (batch, heads, length, head_dim)")
        if not x.is_floating_point():
            raise BadInput(f"{name} is {x.dtype}: attention takes floating-point numbers")
        if x.dtype != q.dtype or x.device != q.device:
            raise BadInput(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}: make them alike")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        sizes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise BadInput(f"{sizes} do not fit: batch and head_dim agree, k and v have the same heads and length")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise BadInput(f"{q.shape[1]} query heads over {k.shape[1]} heads of keys: the second must divide the first")
    if window < 0 or softcap < 0:
        raise BadInput(f"window {window}, softcap {softcap}: use positive numbers, or leave them out")
    if provider and provider not in WAYS:
        raise BadInput(f"unknown provider {provider!r} of attention: use {nearest(provider, list(WAYS))}")


def why_not(
    provider: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    causal: bool = False, window: int = 0, softcap: float = 0.0, scale: float = 1.0, extras: Extras = NONE,
) -> str:  # fmt: skip
    """Why a step of the ladder does not take these; empty where it does."""
    if extras != NONE and provider != "flash":
        return f"flash alone has {extras.words()}"
    return why_no_way(q, k, v) or WAYS[provider].why_not(q, k, v, Mask(causal=causal, window=window), softcap, scale)


def why_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int, softcap: float, scale: float,
    provider: str,
) -> str:  # fmt: skip
    """PyTorch's fused kernels have no mask, or a causal one over equal lengths. All else goes through a mask of
    q_len x kv_len there, or op by op, and is ours."""
    q_len, kv_len = q.shape[2], k.shape[2]
    mask = Mask(causal=causal, window=window).needed(q_len, kv_len)
    is_fused = not softcap and not mask.window and not (mask.causal and q_len != kv_len)
    reason = why_torch_with_lse(q, k, v, causal, window, softcap, scale, provider)
    if reason or provider or not is_fused:
        return reason
    if wants_grad((q, k, v)):
        return CUDNN_TRAINING
    return "" if hopper.is_faster(q, k, v, mask, softcap, scale) else CUDNN


def why_torch_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int, softcap: float, scale: float,
    provider: str,
) -> str:  # fmt: skip
    """The logarithm of the sums PyTorch gives only op by op."""
    if (reason := why_no_way(q, k, v)) or provider:
        return reason
    return "" if _is_hopper() and q.element_size() == 2 else NOT_TIMED


@constant_when_compiled
def _is_hopper() -> bool:
    """Whether the GPU that calls run on is one; without any GPU, plans are made for one."""
    return facts_here().capability == 90


def plan_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int, softcap: float, scale: float,
    provider: str,
) -> Plan:  # fmt: skip
    check(q, k, v, window, softcap, provider)
    how = Mask(causal=causal, window=window), softcap, scale
    quickest = "hopper" if not provider and hopper.is_faster(q, k, v, *how) else "flash"
    return WAYS[provider or quickest].forward(q, k, v, *how)


def plan_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, sums: torch.Tensor,
    causal: bool, window: int, softcap: float, scale: float, provider: str,
) -> Plan:  # fmt: skip
    mask = Mask(causal=causal, window=window)
    return WAYS[provider or "flash"].backward(dout, dlse is not None, q, k, v, out, mask, softcap, scale)
