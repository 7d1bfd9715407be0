"""A Llama over a cache in pages. Prefill takes one text's chunk, decode one token of each of many texts.

q, k and v are one product, gate and up another. Nothing here knows of requests: tokens, positions, slots and tables in,
logits out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sublight.engines.generate.config import Config
from sublight.engines.generate.layers import Mode, layers_of

Maybe = torch.Tensor | None
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q and the layer's two caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer's weights."""

    norm_1: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: Maybe
    out: torch.Tensor
    out_bias: Maybe
    norm_2: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: Maybe
    down: torch.Tensor
    down_bias: Maybe


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    tokens: torch.Tensor
    blocks: tuple[Block, ...]
    norm: torch.Tensor
    head: torch.Tensor


class Cache:
    """Keys and values of every layer: (layers, pages, page_size, kv_heads, head_dim)."""

    def __init__(self, config: Config, pages: int, size: int, like: torch.Tensor) -> None:
        shape = (config.layers, pages, size, config.kv_heads, config.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2))


class Llama:
    def __init__(self, config: Config, weights: Weights, *, mode: Mode = "ours", longest: int = 0) -> None:
        """`longest` limits the table of angles where a cache is shorter than the model's positions."""
        self.config, self.weights, self.layers = config, weights, layers_of(mode)
        turns = torch.tensor(config.frequencies(), dtype=torch.float64)
        angles = torch.outer(torch.arange(longest or config.longest, dtype=torch.float64), turns)
        like = weights.tokens
        self.cos, self.sin = (x.to(like.device, like.dtype) for x in (angles.cos(), angles.sin()))

    @torch.no_grad()
    def prefill(
        self, ids: torch.Tensor, start: int, slots: torch.Tensor, pages: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """A chunk of one text, from its token `start` on; the logits of the chunk's last token, (vocab,)."""
        length, heads = start + len(ids), self.config.kv_heads

        def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            k, v = (x[pages].view(1, -1, heads, x.shape[-1])[:, :length].transpose(1, 2) for x in (k_cache, v_cache))
            out = self.layers.prefill_attention(q.transpose(0, 1)[None], k, v, self.config.window)
            return out[0].transpose(0, 1)  # (t, h, d), as q

        positions = torch.arange(start, length, device=ids.device)
        hidden = self._hidden(ids, positions, slots, cache, attend)
        return F.linear(hidden[-1], self.weights.head)

    @torch.no_grad()
    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        cache: Cache,
    ) -> torch.Tensor:
        """One token of each text; (texts, vocab). It never waits for the device, so that a CUDA graph may hold it."""

        def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            return self.layers.paged_attention(q, k_cache, v_cache, table, lengths, window=self.config.window)

        return F.linear(self._hidden(ids, positions, slots, cache, attend), self.weights.head)

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, cache: Cache, attend: Attend
    ) -> torch.Tensor:
        config, layers, count = self.config, self.layers, len(ids)
        x = layers.embedding(ids, self.weights.tokens)
        residual: Maybe = None
        for number, block in enumerate(self.weights.blocks):
            if residual is None:
                residual, x = x, layers.rms_norm(x, block.norm_1, config.eps)
            else:
                x, residual = layers.add_rms_norm(x, residual, block.norm_1, config.eps)
            qkv = F.linear(x, block.qkv, block.qkv_bias).view(count, -1, config.head_dim)
            q, k, v = qkv.split((config.heads, config.kv_heads, config.kv_heads), 1)
            q, k = (each[0] for each in layers.rope(q[None], k[None], self.cos, self.sin, positions[None]))
            k_cache, v_cache = cache.k[number], cache.v[number]
            layers.kv_write(k, v, k_cache, v_cache, slots)
            mixed = attend(q, k_cache, v_cache).reshape(count, -1)
            x = F.linear(mixed, block.out, block.out_bias)
            x, residual = layers.add_rms_norm(x, residual, block.norm_2, config.eps)
            wide = layers.swiglu(F.linear(x, block.gate_up, block.gate_up_bias))
            x = F.linear(wide, block.down, block.down_bias)
        assert residual is not None
        return layers.add_rms_norm(x, residual, self.weights.norm, config.eps)[0]
