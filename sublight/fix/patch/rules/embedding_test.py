"""Embedding tables: the plain lookup is swapped, whatever else a table does to its rows or gradients is left."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from sublight.fix.patch.model import patch, unpatch
from sublight.fix.patch.record import Left, Swap
from sublight.fix.patch.rules import embedding
from sublight.fix.patch.rules.embedding import EMBEDDING


class Scaled(nn.Embedding):
    def __init__(self, *args: Any, scale: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale


class Plain(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)


class Positions(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.arange(ids.shape[-1]).expand(ids.shape))


@pytest.mark.parametrize(
    "module", [nn.Embedding(50, 6), nn.Embedding(50, 6, padding_idx=-3), Plain(50, 6, padding_idx=40)]
)
def test_values_and_gradients(module: Any) -> None:
    other = copy.deepcopy(module)
    assert patch(module, rules=(EMBEDDING,)).swapped == 1
    ids = torch.randint(0, 50, (4, 33))
    for each in (module, other):
        each(ids).square().sum().backward()
    assert torch.equal(module(ids), other(ids))
    torch.testing.assert_close(module.weight.grad, other.weight.grad)  # added up in another order
    assert unpatch(module) == 1


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Embedding(9, 6, max_norm=1.0), "max_norm"),
        (nn.Embedding(9, 6, sparse=True), "sparse"),
        (nn.Embedding(9, 6, scale_grad_by_freq=True), "frequency"),
        (Scaled(9, 6, scale=2.5), "no plain lookup"),
        (Positions(9, 6), "no plain lookup"),
    ],
)
def test_what_is_left(module: Any, reason: str) -> None:
    answer = embedding.find(module, module)
    assert isinstance(answer, Left) and reason in answer.reason


def test_others_and_large_tables() -> None:
    assert embedding.find(nn.Linear(3, 3), nn.Module()) is None
    assert embedding.find(nn.EmbeddingBag(3, 3), nn.Module()) is None
    assert isinstance(embedding.find(Plain(2**20, 4096, device="meta"), nn.Module()), Swap)


def test_tied_weights_stay_tied() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(9, 6), "head": nn.Linear(6, 9, bias=False)})
    model["head"].weight = model["table"].weight
    patch(model, rules=(EMBEDDING,))
    assert model["head"].weight is model["table"].weight
    model["head"](model["table"](torch.tensor([1, 2]))).sum().backward()
    assert model["table"].weight.grad is not None


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    module = nn.Embedding(1000, 64, padding_idx=3, device="cuda")
    ids = torch.randint(0, 1000, (4, 333), device="cuda")
    other = copy.deepcopy(module)
    assert patch(module, ids, rules=(EMBEDDING,)).swapped == 1
    for each in (module, other):
        each(ids).square().sum().backward()
    assert torch.equal(module(ids), other(ids))
    torch.testing.assert_close(module.weight.grad, other.weight.grad)
