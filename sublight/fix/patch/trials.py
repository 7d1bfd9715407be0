"""A small model for tests of patching, and how much of it is patched."""

from __future__ import annotations

from typing import Any

import torch

from sublight.fix.patch.model import is_patched


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))  # type: ignore[no-any-return]


def model(width: int = 16) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(width), Block(width), torch.nn.LayerNorm(width))


def batch(width: int = 16) -> Any:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1))


def count(found: Any) -> int:
    return sum(is_patched(module) for module in found.modules())
