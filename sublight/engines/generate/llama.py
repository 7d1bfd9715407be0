"""A Llama over a cache in pages. Prefill takes one text's chunk, decode one token of each of many texts.

q, k and v are one product, gate and up another; a product's weight is dense, or packed as `sublight.quantize` packs it.
Nothing here knows of requests: tokens, positions, slots and tables in, logits out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sublight.engines.generate.config import Config
from sublight.engines.generate.layers import Mode, layers_of
from sublight.fix.quantize.coded import CodedLinear
from sublight.fix.quantize.linear import PackedLinear

Maybe = torch.Tensor | None
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q and the layer's two caches


@dataclass(frozen=True, slots=True)
class Dense:
    """A product's weight (out, in) as it is, and its bias."""

    weight: torch.Tensor
    bias: Maybe = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


Product = Dense | PackedLinear | CodedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer's weights."""

    norm_1: torch.Tensor
    qkv: Product
    out: Product
    norm_2: torch.Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    tokens: torch.Tensor
    blocks: tuple[Block, ...]
    norm: torch.Tensor
    head: Dense

    @property
    def read_bytes(self) -> int:
        """What one step of decoding reads of them: all but the table of tokens, of which it takes some rows."""
        products = [each for block in self.blocks for each in (block.qkv, block.out, block.gate_up, block.down)]
        norms = sum(block.norm_1.nbytes + block.norm_2.nbytes for block in self.blocks) + self.norm.nbytes
        return sum(each.nbytes for each in (*products, self.head)) + norms


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
        return self._product(hidden[-1:], self.weights.head)[0]

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

        return self._product(self._hidden(ids, positions, slots, cache, attend), self.weights.head)

    def _product(self, x: torch.Tensor, by: Product) -> torch.Tensor:
        if isinstance(by, Dense):
            return self.layers.linear(x, by.weight, by.bias)
        return by(x)  # type: ignore[no-any-return]

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
            qkv = self._product(x, block.qkv).view(count, -1, config.head_dim)
            q, k, v = qkv.split((config.heads, config.kv_heads, config.kv_heads), 1)
            q, k = (each[0] for each in layers.rope(q[None], k[None], self.cos, self.sin, positions[None]))
            k_cache, v_cache = cache.k[number], cache.v[number]
            layers.kv_write(k, v, k_cache, v_cache, slots)
            mixed = attend(q, k_cache, v_cache).reshape(count, -1)
            x = self._product(mixed, block.out)
            x, residual = layers.add_rms_norm(x, residual, block.norm_2, config.eps)
            wide = layers.swiglu(self._product(x, block.gate_up))
            x = self._product(wide, block.down)
        assert residual is not None
        return layers.add_rms_norm(x, residual, self.weights.norm, config.eps)[0]
