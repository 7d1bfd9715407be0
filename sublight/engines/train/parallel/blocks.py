"""A block whose products are modules, which tensor parallelism slices; and a pipeline's stage, some of the blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sublight.engines.train.gpt2 import EPS, Block, Gpt2, cast


class SplitBlock(Block):
    """A block that holds some heads and hidden columns of a whole one; a head's query, key and value lie together."""

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x)
        q, k, v = qkv.view(batch, length, self.heads, 3, -1).permute(3, 0, 2, 1, 4).unbind()
        mixed = self._attention(q, k, v, self.dropout if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


@torch.no_grad()
def interleave(block: Block) -> None:
    """Reorder all queries, keys and values to the three of each head: then any number of ranks cuts between heads."""
    for x in (block.qkv.weight, block.qkv.bias):
        x.copy_(x.unflatten(0, (3, block.heads, -1)).transpose(0, 1).flatten(0, 2).clone())


def in_rows(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Back from `interleave`."""
    found: torch.Tensor = qkv.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return found


class Stage(nn.Module):
    """The `number`-th of so many equal shares of a model's blocks; its weights keep their names."""

    def __init__(self, model: Gpt2, number: int, stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = number == 0, number == stages - 1
        self.whole_shape, self.compute, self._layers = model.shape, model.compute, model._layers
        layers = model.shape.layers
        mine = range(layers * number // stages, layers * (number + 1) // stages)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in mine})
        if self.is_first or self.is_last:
            self.tokens = model.tokens
        if self.is_first:
            self.positions, self.dropout = model.positions, model.dropout
        if self.is_last:
            self.norm = model.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens or of the residual; gives the residual, or at the end what the output head is multiplied with."""
        if self.is_first:
            x = Gpt2.embed(self, x)  # type: ignore[arg-type]
        residual: torch.Tensor | None = None
        for block in self.blocks.values():
            x, residual = block(x, residual)
        assert residual is not None
        if not self.is_last:
            return x + residual
        return self._layers.add_layer_norm(x, residual, *self.norm.cast(x.dtype), EPS)[0]

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        return self._layers.loss(rows, cast(self.tokens, self.compute), labels.reshape(-1))
