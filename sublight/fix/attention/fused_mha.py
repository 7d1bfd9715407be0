"""`torch.nn.MultiheadAttention` with our attention inside: same arguments, same state dict, same results.

What ours does not take, weights that are asked for, masks that are tensors, padding, added biases, nested tensors, goes
to PyTorch's own forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from sublight.ops.attention.attention import attention
from sublight.ops.attention.extended import why_no_way


class FusedMHA(torch.nn.MultiheadAttention):
    """A drop-in: build it as PyTorch's, or of a module that is there with `FusedMHA.of`."""

    provider: str = ""  # of `sublight.attention`; empty: its plan decides

    @classmethod
    def of(cls, module: torch.nn.MultiheadAttention, *, provider: str = "") -> FusedMHA:
        """The same module, parameters and hooks shared, with our forward."""
        fused = cls.__new__(cls)
        fused.__dict__.update(module.__dict__)
        fused.provider = provider
        return fused

    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As PyTorch's; with `is_causal` the mask that it asks for beside is taken at its word."""
        is_ours = not need_weights and key_padding_mask is None and self._is_plain(query, key, value)
        is_ours = is_ours and (attn_mask is None) == (not is_causal)
        rows = 1 if self.batch_first else 0
        if is_ours and is_causal:  # PyTorch aligns the first query to the first key, ours the last to the last
            is_ours = query.shape[rows] == key.shape[rows]
        found = self._fused(query, key, value, is_causal) if is_ours else None
        if found is not None:
            return found, None
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    def _is_plain(self, *tensors: torch.Tensor) -> bool:
        has_additions = self.bias_k is not None or self.bias_v is not None or self.add_zero_attn
        return not has_additions and all(x.dim() == 3 and not x.is_nested for x in tensors)

    def _fused(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor | None:
        """None where dropout would pass every score through memory."""
        dropout = self.dropout if self.training else 0.0
        tensors = (query, key, value) if self.batch_first else tuple(x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for x in self._projected(*tensors))
        if dropout and why_no_way(q, k, v):
            return None
        options: dict[str, Any] = {"causal": causal, "dropout": dropout, "provider": self.provider}
        heads = attention(q, k, v, **options)  # (b, h, t, d)
        # a copy, where one is needed, before the projection: its result lies in one piece, as PyTorch's does
        rows = heads.transpose(1, 2) if self.batch_first else heads.permute(2, 0, 1, 3)
        return self.out_proj(rows.flatten(2))  # type: ignore[no-any-return]  # (b, t, e) or (t, b, e)

    def _projected(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key and value projected, by one product where all three are one tensor."""
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if not self._qkv_same_embed_dim:
            weights: tuple[torch.Tensor, ...] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            return linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, 2)
        else:
            weights = self.in_proj_weight.chunk(3)
        return tuple(
            linear(x, weight, bias) for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
