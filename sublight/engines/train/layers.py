"""What a GPT-2 is made of, twice: on our ops and on PyTorch's. The model takes either, so that both can be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sublight.engines.train import products
from sublight.errors import BadInput, one_of
from sublight.ops.attention.attention import attention as our_attention
from sublight.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from sublight.ops.movement.embedding import embedding
from sublight.ops.norm.add_layer_norm import add_layer_norm
from sublight.ops.norm.layer_norm import layer_norm

Tensor = torch.Tensor
Pair = products.Pair
Mode = Literal["eager", "compile", "ours"]
MODES: tuple[Mode, ...] = ("eager", "compile", "ours")
Attention = Literal["naive", "torch", "flash", "cudnn", "ours"]
ATTENTIONS: tuple[Attention, ...] = ("naive", "torch", "flash", "cudnn", "ours")
ALL_LOGITS = 1 << 40  # bytes held at once: they become their own gradient, and one product is faster than several
IGNORED = -100  # a label that counts for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The functions that one mode of the model calls."""

    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    add_layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]  # normed, sum
    linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    heads_of: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]  # queries, keys, values
    mlp: Callable[[Tensor, Pair, Pair], Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden, the head's weight, labels; in fp32


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _torch_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_layer_norm(total, weight, bias, eps), total


def _torch_mlp(x: Tensor, up: Pair, down: Pair) -> Tensor:
    return F.linear(F.gelu(F.linear(x, *up), approximate="tanh"), *down)


def _torch_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=IGNORED)


TORCH = Layers(
    layer_norm=_torch_layer_norm,
    add_layer_norm=_torch_add_layer_norm,
    linear=F.linear,
    heads_of=products.plain_heads_of,
    mlp=_torch_mlp,
    embedding=F.embedding,
    loss=_torch_loss,
)
OURS = Layers(
    layer_norm=layer_norm,
    add_layer_norm=add_layer_norm,
    linear=products.linear,
    heads_of=products.heads_of,
    mlp=products.mlp,
    embedding=embedding,
    loss=lambda hidden, weight, labels: linear_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORED, wide=True, chunk_bytes=ALL_LOGITS
    ),
)

FRUGAL = replace(OURS, mlp=partial(products.mlp, keep=False))
PLAIN = replace(OURS, linear=F.linear, heads_of=products.plain_heads_of, mlp=products.plain_mlp)


Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # queries, keys, values, dropout of the weights


def naive(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Op by op: every score goes through memory."""
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return F.dropout(torch.softmax(scores.masked_fill(hidden, -torch.inf), -1), dropout) @ v


def _torch(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """PyTorch's fused attention, by the kernel that it chooses."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def _fused(*backends: SDPBackend) -> Attend:
    def call(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        with sdpa_kernel(list(backends)):
            return _torch(q, k, v, dropout)

    return call


def _ours(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Our attention where `sublight.why` says so; with dropout PyTorch's, whose random numbers a checkpoint saves."""
    if dropout:
        return _torch(q, k, v, dropout)
    found: Tensor = our_attention(q, k, v, causal=True)
    return found


def _in_order(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Gradients that are added up in one order: our `flash`, or op by op with dropout."""
    if dropout:
        return naive(q, k, v, dropout)
    found: Tensor = our_attention(q, k, v, causal=True, provider="flash")
    return found


def attention_by(name: Attention, device: str, *, deterministic: bool = False) -> Attend:
    """Causal attention of (batch, heads, length, head_dim)."""
    one_of("attention", name, ATTENTIONS)
    if deterministic and device == "cuda" and name not in ("naive", "ours"):
        raise BadInput(
            f"--attention {name} adds gradients up in no fixed order: use ours or naive with --deterministic"
        )
    if deterministic and device == "cuda" and name == "ours":
        return _in_order
    if name == "cudnn" and device != "cuda":
        raise BadInput("--attention cudnn needs an NVIDIA GPU: use naive, flash or ours here")
    if name == "flash":  # on a CPU it has no dropout
        return _fused(SDPBackend.FLASH_ATTENTION, *([SDPBackend.MATH] if device != "cuda" else []))
    if name == "cudnn":
        return _fused(SDPBackend.CUDNN_ATTENTION)
    return {"naive": naive, "torch": _torch, "ours": _ours}[name]


def layers_of(mode: Mode, *, deterministic: bool = False) -> Layers:
    """Of ours, which products are the fastest is timed anew in each process: where bits must not change, none are."""
    if one_of("mode", mode, MODES) != "ours":
        return TORCH
    return PLAIN if deterministic else OURS
