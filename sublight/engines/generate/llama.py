"""A Llama over a cache in pages. Prefill takes one text's chunk, decode one token of each of many texts.

q, k and v are one product, gate and up another; a product's weight is dense, or packed as `sublight.quantize` packs it.
Nothing here knows of requests: tokens, positions, slots and tables in, logits out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from sublight.engines.generate.config import Config
from sublight.engines.generate.layers import Mode, layers_of
from sublight.fix.quantize.coded import CodedLinear
from sublight.fix.quantize.linear import PackedLinear
from sublight.fix.quantize.row import streamed, why_not_streamed

Maybe = torch.Tensor | None
Row = Callable[..., torch.Tensor]  # x, product, norm's weight, residual, gated
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]  # q, the layer's caches, window


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
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None  # of q's heads and of k's

    @property
    def is_dense(self) -> bool:
        return all(isinstance(each, Dense) for each in (self.qkv, self.out, self.gate_up, self.down))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    tokens: torch.Tensor
    blocks: tuple[Block, ...]
    norm: torch.Tensor
    head: Product

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
        self.cos, self.sin = ((config.amplitude * x).to(like.device, like.dtype) for x in (angles.cos(), angles.sin()))

    @torch.no_grad()
    def prefill(
        self,
        ids: torch.Tensor,
        start: int,
        slots: torch.Tensor,
        pages: torch.Tensor,
        cache: Cache,
        *,
        every: bool = False,
    ) -> torch.Tensor:
        """A chunk of one text, from its token `start` on; the logits of the chunk's last token, (1, vocab), or of
        `every` token."""
        length, heads = start + len(ids), self.config.kv_heads

        def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, window: int | None) -> torch.Tensor:
            k, v = (x[pages].view(1, -1, heads, x.shape[-1])[:, :length].transpose(1, 2) for x in (k_cache, v_cache))
            out = self.layers.prefill_attention(q.transpose(0, 1)[None], k, v, window)
            return out[0].transpose(0, 1)  # (t, h, d), as q

        positions = torch.arange(start, length, device=ids.device)
        hidden = self._hidden(ids, positions, slots, cache, attend)
        return self._product(hidden if every else hidden[-1:], self.weights.head)

    @torch.no_grad()
    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        cache: Cache,
        *,
        in_graph: bool = False,
    ) -> torch.Tensor:
        """One token of each text; (texts, vocab). It never waits for the device, so that a CUDA graph may hold it:
        with `in_graph` one does, and what is dear to launch may be launched. Tables and lengths are older than the
        graph, so attention may begin before the launch that writes this token's key has ended."""
        early = self._early(in_graph)

        def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, window: int | None) -> torch.Tensor:
            return self.layers.paged_attention(q, k_cache, v_cache, table, lengths, window=window, **early)

        hidden, head = self._hidden(ids, positions, slots, cache, attend, in_graph), self.weights.head
        row_linear = self.layers.row_linear if in_graph and len(ids) == 1 and not isinstance(head, Dense) else None
        if row_linear and not why_not_streamed(head, hidden):
            return streamed(hidden, head, eps=self.config.eps, row_linear=row_linear)
        return self._product(hidden, head)

    def _early(self, in_graph: bool) -> dict[str, bool]:
        """The option by which our launches begin before the last one has ended; it takes a graph to gain by it."""
        return {"dependent": True} if in_graph and self.layers.has_early else {}

    def _product(self, x: torch.Tensor, by: Product) -> torch.Tensor:
        if isinstance(by, Dense):
            return self.layers.linear(x, by.weight, by.bias)
        return by(x)  # type: ignore[no-any-return]

    def _hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: Cache,
        attend: Attend,
        in_graph: bool = False,
    ) -> torch.Tensor:
        layers, eps, count = self.layers, self.config.eps, len(ids)
        x = layers.embedding(ids, self.weights.tokens)
        residual: Maybe = None  # what x is to be added to

        def mix(number: int, qkv: torch.Tensor) -> torch.Tensor:
            heads = self._heads(qkv.view(count, -1, self.config.head_dim), self.weights.blocks[number])
            caches = cache.k[number], cache.v[number]
            q = layers.rope_kv_write(heads, self.cos, self.sin, positions, *caches, slots, **self._early(in_graph))
            return attend(q, *caches, self.config.window(number)).reshape(count, -1)

        for number, block in enumerate(self.weights.blocks):
            if count == 1 and residual is None and (by := self._one_row_by(x, block, in_graph)):
                x = self._one_row(x, block, partial(mix, number), by)
                continue
            if residual is None:
                residual, x = x, layers.rms_norm(x, block.norm_1, eps)
            else:
                x, residual = layers.add_rms_norm(x, residual, block.norm_1, eps)
            x = self._product(mix(number, self._product(x, block.qkv)), block.out)
            x, residual = layers.add_rms_norm(x, residual, block.norm_2, eps)
            x = self._product(layers.swiglu(self._product(x, block.gate_up)), block.down)
        if residual is None:
            return layers.rms_norm(x, self.weights.norm, eps)
        return layers.add_rms_norm(x, residual, self.weights.norm, eps)[0]

    def _heads(self, heads: torch.Tensor, block: Block) -> torch.Tensor:
        """q, k and v (t, heads, d), normed where the model has norms for them."""
        if block.head_norms is None:
            return heads
        kv_heads = self.config.kv_heads
        q, k, v = heads.split((self.config.heads, kv_heads, kv_heads), 1)
        normed = [self.layers.rms_norm(x, by, self.config.eps) for x, by in zip((q, k), block.head_norms, strict=True)]
        return torch.cat((*normed, v), 1)

    def _one_row_by(self, x: torch.Tensor, block: Block, in_graph: bool) -> Row | None:
        """Products of one row with norms and activations inside, by the way that takes this block; None: none does."""
        products = (block.qkv, block.out, block.gate_up, block.down)
        if in_graph and self.layers.row_linear and not any(why_not_streamed(each, x) for each in products):
            return partial(streamed, row_linear=self.layers.row_linear, eps=self.config.eps)
        if self.layers.norm_linear and block.is_dense:
            return partial(_normed, self.layers.norm_linear, self.layers.linear, self.config.eps)
        return None

    def _one_row(
        self, x: torch.Tensor, block: Block, mix: Callable[[torch.Tensor], torch.Tensor], by: Row
    ) -> torch.Tensor:
        """The same with fewer launches: norms and SwiGLU inside of products, what is added behind them, too."""
        x = by(mix(by(x, block.qkv, block.norm_1)), block.out, residual=x)
        return by(by(x, block.gate_up, block.norm_2, gated=True), block.down, residual=x)


def _normed(
    norm_linear: Callable[..., torch.Tensor], linear: Callable[..., torch.Tensor], eps: float, x: torch.Tensor,
    by: Product, norm: Maybe = None, residual: Maybe = None, gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert isinstance(by, Dense)
    if norm is None:
        return linear(x, by.weight, by.bias, residual)
    return norm_linear(x, norm, by.weight, by.bias, eps=eps, gated=gated)
