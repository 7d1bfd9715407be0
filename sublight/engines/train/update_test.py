"""A change of the weights by 16-bit copies: the fp32 weights change, the copies follow, parts add up in fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.nn.functional as F
from torch import nn

from sublight.engines.train.gpt2 import cast
from sublight.engines.train.settings import Settings
from sublight.engines.train.shape import Shape
from sublight.engines.train.update import Update
from sublight.ops.adamw.optimizer import AdamW

VOCAB = 16


class Toy(nn.Module):
    """A table of logits: no op of ours, which an interpreter would compute wrongly in bf16."""

    shape = Shape(layers=1, dim=VOCAB, heads=1, context=4, vocab=VOCAB)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = F.one_hot(ids, VOCAB).to(torch.bfloat16) @ cast(self.table, torch.bfloat16)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def updated(clip: float = 0.0, **changes: Any) -> tuple[Toy, Update]:
    how: dict[str, Any] = {"steps": 9, "batch": 6, "context": 4, "lr": 0.1, "warmup": 0, "mode": "ours"}
    model = Toy()
    update = Update(model, Settings(**how | {"dtype": "bfloat16", "clip": clip} | changes), torch.device("cpu"))  # type: ignore[arg-type]
    update.prepare()
    return model, update


def batch(parts: int) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (6, 5), generator=torch.Generator().manual_seed(2))
    return ids.view(parts, 6 // parts, 5)


def test_weights_change_in_fp32_and_copies_follow() -> None:
    model, update = updated()
    before = model.table.detach().clone()
    update(batch(1), 1e-4)
    assert isinstance(update.optimizer, AdamW)
    copy = update.optimizer.copies[model.table]
    assert copy is cast(model.table, torch.bfloat16) and cast(model.table, torch.float32) is model.table
    change = (model.table - before).abs()
    assert 0 < change.max() < 1e-3  # of which bf16 would lose nearly all
    assert torch.equal(copy, model.table.bfloat16()) and copy.grad is None and model.table.grad is None
    losses = [float(update(batch(1), 0.1)[0]) for _ in range(5)]
    assert losses[-1] < 0.8 * losses[0]


def test_gradients_of_parts_are_added_up_in_fp32() -> None:
    model, update = updated(clip=1e9, accumulate=3)
    total = torch.zeros_like(model.table)
    for part in batch(3):
        loss = model(part[:, :-1], part[:, 1:]) / 3
        total += torch.autograd.grad(loss, [cast(model.table, torch.bfloat16)])[0].float()
    loss, norm = update(batch(3), 0.1)
    truth, roundings = float(total.double().norm()), math.log2(total.numel()) + 2  # a tree of sums, a square, a root
    assert abs(float(norm) - truth) <= roundings * 2**-24 * truth
    assert float(loss) > 0


def test_fp32_needs_no_copies() -> None:
    _, update = updated(dtype="float32")
    assert isinstance(update.optimizer, torch.optim.AdamW) and not update.why_no_graph()
