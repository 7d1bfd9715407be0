"""For tests: a tiny random model, its engine, and words of one letter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sublight.engines.generate import weights
from sublight.engines.generate.config import Config
from sublight.engines.generate.engine import Engine
from sublight.engines.generate.llama import Llama

VOCAB = 64
CONFIG = Config(
    layers=1, dim=16, inner=16, heads=2, kv_heads=1, head_dim=8, vocab=VOCAB, longest=96, eps=1e-6, theta=1e4
)  # fmt: skip


class Letters:
    """A letter a token."""

    def encode(self, text: str, *, is_whole: bool = False) -> list[int]:
        return [(ord(letter) - 48) % VOCAB for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(48 + token) for token in ids)


def tiny_model(std: float = 0.4) -> Llama:
    """A tiny model whose weights are large enough that its tokens differ."""
    made = weights.random(CONFIG, dtype=torch.float32, device="cpu")
    for block in made.blocks:
        for product in (block.qkv, block.out, block.gate_up, block.down):
            product.weight.mul_(std / 0.02)
    made.tokens.mul_(std / 0.02)
    return Llama(CONFIG, made, mode="eager")


def tiny_engine(model: Llama | None = None, **how: Any) -> Engine:
    return Engine(model or tiny_model(), **{"pages": 24, "page": 4, "most_texts": 6, "most_tokens": 32, **how})
