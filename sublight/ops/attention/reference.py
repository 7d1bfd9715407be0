"""Attention in PyTorch's own ops: what a call gets where no kernel of ours takes it, and what ours is judged by."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from sublight.ops.attention.masks import Mask

MOST_SCORES = 2**26  # in float64 at once: half a gigabyte, several times over


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float) -> torch.Tensor:
    """The result alone: PyTorch's fused attention, or with a soft cap, which it lacks, op by op."""
    if q.dtype == torch.float64 or softcap:
        return attend_with_lse(q, k, v, mask, softcap, scale)[0]
    q_len, kv_len = q.shape[2], k.shape[2]
    if blind := mask.blind(q_len, kv_len):
        if blind == q_len:  # zeros, and gradients of zero
            return attend_with_lse(q, k, v, mask, softcap, scale)[0]
        nothing = torch.zeros_like(q[:, :, :blind, : v.shape[3]])
        return torch.cat([nothing, attend(q[:, :, blind:], k, v, mask, softcap, scale)], 2)
    mask = mask.needed(q_len, kv_len)
    # PyTorch aligns the first query to the first key
    is_causal = mask.causal and not mask.window and is_true(q_len == kv_len)
    seen = None if is_causal else mask.matrix(q_len, kv_len, q.device)
    is_shared = is_true(q.shape[1] != k.shape[1])
    if q.is_cuda:
        q, k, v = (in_step(x) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=is_causal, scale=scale, enable_gqa=is_shared)


def is_true(condition: Any) -> bool:
    """A comparison of sizes as the bool that PyTorch's attention asks for: to torch.jit sizes are tensors, and to
    torch.compile, where they vary, symbols, which `bool` leaves as they are."""
    return True if condition else False  # noqa: SIM210


def in_step(x: torch.Tensor) -> torch.Tensor:
    """Rows that begin at multiples of 16 bytes: PyTorch's fused kernels read others out of step (cuDNN's end with a
    "misaligned address"), with a mask there are none for them; they look at strides that are never taken, too (of a
    dimension of one), which `contiguous` leaves as they are."""
    start = 0 if torch.compiler.is_compiling() else x.storage_offset()  # Inductor copies what begins out of step itself
    is_even = not any(step % (16 // x.element_size()) for step in (start, *x.stride()[:-1]))
    return x if is_even else x.clone(memory_format=torch.contiguous_format)


def attend_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the logarithm of each query's sum of exponentials; op by op, head by head where that is large."""
    composed: Any = partial(_composed, mask=mask, softcap=softcap, scale=scale)
    heads, kv_heads = q.shape[1], k.shape[1]
    share = heads // kv_heads
    if q.shape[0] * heads * q.shape[2] * k.shape[2] <= MOST_SCORES:
        return composed(q, k, v)  # type: ignore[no-any-return]
    rows = []
    for each_q, each_k, each_v in zip(q.split(1), k.split(1), v.split(1), strict=True):
        triples = zip(each_q.split(share, 1), each_k.split(1, 1), each_v.split(1, 1), strict=True)
        parts = [checkpoint(composed, *triple, use_reentrant=False) for triple in triples]
        rows.append([torch.cat(each, 1) for each in zip(*parts, strict=True)])
    out, lse = (torch.cat(each) for each in zip(*rows, strict=True))
    return out, lse


def _composed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softcap: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(wide)
    if (seen := mask.matrix(q.shape[2], k.shape[2], q.device)) is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    blind = mask.blind(q.shape[2], k.shape[2])
    if not blind:
        return torch.softmax(scores, -1).to(q.dtype) @ v, torch.logsumexp(scores, -1)
    weights, lse = torch.softmax(scores[:, :, blind:], -1).to(q.dtype), torch.logsumexp(scores[:, :, blind:], -1)
    nothing = torch.zeros_like(q[:, :, :blind, : v.shape[3]])
    none = scores.new_full((*scores.shape[:2], blind), -torch.inf)
    return torch.cat([nothing, weights @ v], 2), torch.cat([none, lse], 2)
