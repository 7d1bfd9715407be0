"""Our attention under Hugging Face's name for it: `attn_implementation="sublight"`.

Masks are made as for `sdpa`: where a model's mask is plainly causal or hides nothing there is no tensor, and the call
is ours, soft caps, sinks and dropout included. A mask that is a tensor (padding, a window, packed positions) goes to
PyTorch's, as `sdpa` does; with a soft cap or sinks, which that lacks, op by op.
"""

from __future__ import annotations

from typing import Any

import torch

from sublight.errors import BadInput
from sublight.ops.attention.attention import attention
from sublight.ops.attention.extended import why_no_way
from sublight.ops.attention.ladder import WAYS

NAME = "sublight"


def use_in_transformers(*, provider: str = "") -> str:
    """Registers our attention with transformers, and gives the name for `attn_implementation`.

    `provider` names a step of the ladder (`flash`); without it the plan decides at each call.
    """
    if provider and provider not in WAYS:
        raise BadInput(f"unknown provider {provider!r} of attention: use {', '.join(WAYS)}")
    try:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError:
        raise BadInput("transformers is not here, or older than 4.53: pip install -U transformers") from None

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        is_plain = attention_mask is None and more.get("position_bias") is None and more.get("cache") is None
        if is_plain and not (dropout and why_no_way(query, key, value)):
            causal = is_causal and query.shape[2] > 1  # one query sees all, wherever the first is aligned to
            if not causal or query.shape[2] == key.shape[2]:
                out = attention(
                    query, key, value, causal=causal, scale=scaling, softcap=softcap or 0.0, sinks=s_aux,
                    dropout=dropout, provider=provider,
                )  # fmt: skip
                return out.transpose(1, 2).contiguous(), None
        if softcap or s_aux is not None:
            if not is_plain and attention_mask is None:
                raise BadInput(
                    "a position bias or paged cache beside a soft cap or sinks: use attn_implementation='eager'"
                )
            causal = is_causal and attention_mask is None and query.shape[2] > 1
            out = _masked(query, key, value, attention_mask, causal, scaling, softcap, s_aux, dropout)
            return out.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=is_causal, **more
        )

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def _masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None,
    softcap: float | None, sinks: torch.Tensor | None, dropout: float,
) -> torch.Tensor:  # fmt: skip
    """Op by op, as models' own eager attention; `mask` is true where a key is seen, or is added to scores."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = (q @ k.mT) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:  # the first query at the first key, as PyTorch has it
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(q.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], 3)
    weights = torch.softmax(scores, -1, dtype=torch.float32)[..., : k.shape[2]].to(q.dtype)
    return torch.dropout(weights, dropout, bool(dropout)) @ v
