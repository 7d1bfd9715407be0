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

from sublight.engines.train.layers import FRUGAL, OURS, Attend, Attention, Layers, Mode, attention_by, layers_of
from sublight.engines.train.shape import Shape

EPS = 1e-5
INIT_STD, INIT_DIM = 0.02, 768  # GPT-2's; narrower models begin with larger weights, so that products stay as large


def cast(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in the type that is computed in: the copy that a run holds of it, or one that is made for this use."""
    held: torch.Tensor | None = getattr(parameter, "held", None)
    return held if held is not None and held.dtype == dtype else parameter.to(dtype)


def hold(model: nn.Module, dtype: torch.dtype) -> dict[torch.Tensor, torch.Tensor]:
    """Copies of all weights that `cast` gives from now on: gradients go to them, an optimizer keeps them up to date."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for parameter in model.parameters():
        parameter.held = copies[parameter] = parameter.detach().to(dtype).requires_grad_()  # type: ignore[attr-defined]
    return copies


class Norm(nn.Module):
    """Weights of a layer norm; the block calls the fused op with them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def cast(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return cast(self.weight, dtype), cast(self.bias, dtype)


class Linear(nn.Linear):
    """Weights of a product, in the data type of what it is multiplied with."""

    def cast(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return cast(self.weight, dtype), cast(self.bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, *self.cast(x.dtype))


class Block(nn.Module):
    def __init__(self, shape: Shape, layers: Layers, attend: Attend, dropout: float) -> None:
        super().__init__()
        dim = shape.dim
        self.heads, self.dropout = shape.heads, dropout
        self.norm_1, self.norm_2 = Norm(dim), Norm(dim)
        self.qkv, self.out = Linear(dim, 3 * dim), Linear(dim, dim)
        self.up, self.down = Linear(dim, 4 * dim), Linear(4 * dim, dim)
        self._layers, self._attention = layers, attend

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What is to be added to the residual, and the residual; the first block has none yet."""
        layers, dtype = self._layers, x.dtype
        if residual is None:
            residual = x
            x = layers.layer_norm(x, *self.norm_1.cast(dtype), EPS)
        else:
            x, residual = layers.add_layer_norm(x, residual, *self.norm_1.cast(dtype), EPS)
        x = self._drop(self.attend(x))
        x, residual = layers.add_layer_norm(x, residual, *self.norm_2.cast(dtype), EPS)
        return self._drop(self.feed(x)), residual

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._layers.heads_of(x, *self.qkv.cast(x.dtype), self.heads)  # each (b, h, t, d)
        mixed = self._attention(q, k, v, self.dropout if self.training else 0.0).transpose(1, 2).reshape(x.shape)
        return self._layers.linear(mixed, *self.out.cast(x.dtype))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self._layers.mlp(x, self.up.cast(x.dtype), self.down.cast(x.dtype))

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
        deterministic: bool = False,
        block: type[Block] = Block,
    ) -> None:
        super().__init__()
        self._layers = layers_of(mode, deterministic=deterministic)
        self.shape, self.dropout, self.compute = shape, dropout, compute
        self.tokens = nn.Parameter(torch.empty(shape.vocab, shape.dim))
        self.positions = nn.Parameter(torch.empty(shape.context, shape.dim))
        attend = attention_by(attention, device, deterministic=deterministic)
        # memory is at its peak behind the last block: what that does not keep lowers it
        by_block = [self._layers] * (shape.layers - 1) + [FRUGAL if self._layers is OURS else self._layers]
        self.blocks = nn.ModuleList(block(shape, layers, attend, dropout) for layers in by_block)
        self.norm = Norm(shape.dim)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """What the output head is multiplied with, (batch, length, dim)."""
        x = self.embed(ids)
        residual: torch.Tensor | None = None
        for block in self.blocks:
            x, residual = block(x, residual)
        assert residual is not None
        normed, _ = self._layers.add_layer_norm(x, residual, *self.norm.cast(x.dtype), EPS)
        return normed

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        places = cast(self.positions, self.compute)[: ids.shape[1]]
        x = self._layers.embedding(ids, cast(self.tokens, self.compute)) + places
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(ids), cast(self.tokens, self.compute))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss in fp32; the output head is tied to the table of tokens."""
        hidden = self.hidden(ids)
        return self._layers.loss(hidden.view(-1, self.shape.dim), cast(self.tokens, self.compute), labels.reshape(-1))

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


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    named = list(model.parameters())
    return [
        {"params": [p for p in named if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
