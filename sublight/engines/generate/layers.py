"""What a Llama is made of, twice: on our ops and on PyTorch's. The model takes either, so that both can be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from sublight.errors import one_of
from sublight.ops.attention import kv_write as writing
from sublight.ops.attention import paged_attention as paging
from sublight.ops.attention.attention import attention
from sublight.ops.attention.rope_kv_write import rope_kv_write
from sublight.ops.gated.gated import swiglu
from sublight.ops.matmul.choice import ROWS_BYTES
from sublight.ops.matmul.matmul import matmul
from sublight.ops.matmul.row_linear import row_linear
from sublight.ops.matmul.skinny import MOST_ROWS
from sublight.ops.movement.embedding import embedding
from sublight.ops.norm.add_rms_norm import add_rms_norm
from sublight.ops.norm.rms_norm import rms_norm
from sublight.ops.norm.rms_norm_linear import rms_norm_linear

Tensor = torch.Tensor
Mode = Literal["eager", "ours"]
MODES: tuple[Mode, ...] = ("eager", "ours")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The functions that one mode of the model calls."""

    linear: Callable[..., Tensor]  # x, weight (out, in), bias, and what is added behind it
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]  # normed, sum
    norm_linear: Callable[..., Tensor] | None  # of one row: norm, product and, where it is gated, SwiGLU in one launch
    row_linear: Callable[..., Tensor] | None  # the same of dense and packed weights, for CUDA graphs
    swiglu: Callable[[Tensor], Tensor]  # gate and up side by side
    embedding: Callable[[Tensor, Tensor], Tensor]
    rope_kv_write: Callable[..., Tensor]  # q, k and v side by side in; q turned out, k and v into the cache
    paged_attention: Callable[..., Tensor]
    prefill_attention: Callable[[Tensor, Tensor, Tensor, int | None], Tensor]  # the last query at the last key
    has_early: bool = False  # rope_kv_write and paged_attention take `dependent`: launched before the last one ends


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_rms_norm(total, weight, eps), total


def _torch_swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def _torch_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Each half of a head is turned against the other."""
    c, s = (torch.cat((table, table), -1)[positions][:, :, None].to(q.dtype) for table in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * c + torch.cat((-right, left), -1) * s

    return turned(q), turned(k)


def turn_then(write: Callable[..., Any]) -> Callable[..., Tensor]:
    """Rope by PyTorch, then a function that writes k and v."""

    def both(
        qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> Tensor:
        kv_heads = k_cache.shape[2]
        q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
        q, k = (x[0] for x in _torch_rope(q[None], k[None], cos, sin, positions[None]))
        write(k, v, k_cache, v_cache, slots)
        return q

    return both


def _torch_prefill(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    place = torch.arange(queries, device=q.device)[:, None] + keys - queries
    key = torch.arange(keys, device=q.device)
    seen = (key <= place) & (key > place - (window or keys))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])


def _our_rope_kv_write(*tensors: Tensor, dependent: bool = False) -> Tensor:
    return rope_kv_write(*tensors, dependent=dependent)[0]


def _our_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """`matmul` where it has a kernel of its own, which is for one row, and for up to 64 by a weight as large as a
    head's; else PyTorch's in one call, bias included."""
    if x.shape[0] == 1 or (x.shape[0] <= MOST_ROWS and weight.nbytes >= ROWS_BYTES):
        return matmul(x, weight.T, bias, residual)
    return _torch_linear(x, weight, bias, residual)


TORCH = Layers(
    linear=_torch_linear,
    rms_norm=_torch_rms_norm,
    add_rms_norm=_torch_add_rms_norm,
    norm_linear=None,
    row_linear=None,
    swiglu=_torch_swiglu,
    embedding=F.embedding,
    rope_kv_write=turn_then(writing.reference),
    paged_attention=paging.reference,
    prefill_attention=_torch_prefill,
)
OURS = Layers(
    linear=_our_linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    norm_linear=rms_norm_linear,
    row_linear=row_linear,
    swiglu=swiglu,
    embedding=embedding,
    rope_kv_write=_our_rope_kv_write,
    paged_attention=paging.paged_attention,
    prefill_attention=lambda q, k, v, window: attention(q, k, v, causal=True, window=window),
    has_early=True,
)


def layers_of(mode: Mode) -> Layers:
    return OURS if one_of("mode", mode, MODES) == "ours" else TORCH
