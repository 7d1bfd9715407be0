"""GPT-2: weights are held in fp32, and cast where they are used; activations are of the compute type throughout.

A block's two sums are fused with the norm that follows them, so the residual goes from block to block beside what is
yet to be added to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sublight.engines.train.layers import Attention, Mode, attention_by, layers_of
from sublight.engines.train.shape import Shape

EPS = 1e-5
INIT_STD, INIT_DIM = 0.02, 768  # GPT-2's; narrower models begin with larger weights, so that products stay as large


class Norm(nn.Module):
    """Weights of a layer norm; the block calls the fused op with them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def cast(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight.to(dtype), self.bias.to(dtype)


class Linear(nn.Linear):
    """A product whose weight takes the data type of what it is multiplied with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Block(nn.Module):
    def __init__(self, shape: Shape, mode: Mode, attention: Attention, device: str, dropout: float) -> None:
        super().__init__()
        dim = shape.dim
        self.heads, self.dropout = shape.heads, dropout
        self.norm_1, self.norm_2 = Norm(dim), Norm(dim)
        self.qkv, self.out = Linear(dim, 3 * dim), Linear(dim, dim)
        self.up, self.down = Linear(dim, 4 * dim), Linear(4 * dim, dim)
        self._layers, self._attention = layers_of(mode), attention_by(attention, device)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What is to be added to the residual, and the residual; the first block has none yet."""
        if residual is None:
            residual = x
            x = self._layers.layer_norm(x, *self.norm_1.cast(x.dtype), EPS)
        else:
            x, residual = self._layers.add_layer_norm(x, residual, *self.norm_1.cast(x.dtype), EPS)
        x = self._drop(self.attend(x))
        x, residual = self._layers.add_layer_norm(x, residual, *self.norm_2.cast(x.dtype), EPS)
        wide = F.linear(x, self.up.weight.to(x.dtype))
        x = self.down(self._layers.bias_gelu(wide, self.up.bias.to(x.dtype)))
        return self._drop(x), residual

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (b, h, t, d)
        mixed = self._attention(q, k, v).transpose(1, 2).reshape(batch, length, dim)
        return self.out(mixed)  # type: ignore[no-any-return]

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Gpt2(nn.Module):
    def __init__(
        self,
        shape: Shape,
        *,
        mode: Mode = "ours",
        attention: Attention = "ours",
        device: str = "cpu",
        dropout: float = 0.0,
        compute: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.shape, self.dropout, self.compute = shape, dropout, compute
        self.tokens = nn.Parameter(torch.empty(shape.vocab, shape.dim))
        self.positions = nn.Parameter(torch.empty(shape.context, shape.dim))
        self.blocks = nn.ModuleList(Block(shape, mode, attention, device, dropout) for _ in range(shape.layers))
        self.norm = Norm(shape.dim)
        self._layers = layers_of(mode)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """What the output head is multiplied with, (batch, length, dim)."""
        length = ids.shape[1]
        x = self._layers.embedding(ids, self.tokens.to(self.compute)) + self.positions[:length].to(self.compute)
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        residual: torch.Tensor | None = None
        for block in self.blocks:
            x, residual = block(x, residual)
        assert residual is not None
        normed, _ = self._layers.add_layer_norm(x, residual, *self.norm.cast(x.dtype), EPS)
        return normed

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(ids), self.tokens.to(self.compute))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss in fp32; the output head is tied to the table of tokens."""
        hidden = self.hidden(ids)
        return self._layers.loss(hidden.view(-1, self.shape.dim), self.tokens.to(self.compute), labels.reshape(-1))

    @torch.no_grad()
    def initialize(self, seed: int) -> Gpt2:
        """GPT-2's: normal, what is added to the residual smaller the deeper the model. On the CPU, so that a seed gives
        the same weights on every device."""
        generator = torch.Generator().manual_seed(seed)
        std = INIT_STD * math.sqrt(INIT_DIM / self.shape.dim)

        def fill(x: torch.Tensor, size: float) -> None:
            x.copy_(torch.randn(x.shape, generator=generator) * size)

        fill(self.tokens, std)
        fill(self.positions, std)
        for name, linear in self.named_modules():
            if isinstance(linear, Linear):
                is_added = name.endswith(("out", "down"))
                fill(linear.weight, std / math.sqrt(2 * self.shape.layers) if is_added else std)
                linear.bias.zero_()
        return self


def parameter_groups(model: Gpt2, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    named = list(model.parameters())
    return [
        {"params": [p for p in named if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
