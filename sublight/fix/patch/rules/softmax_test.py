"""Softmax along the last dimension, by its values; where the dimension is another, the module's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from sublight.fix.patch.model import patch
from sublight.fix.patch.record import Left
from sublight.fix.patch.rules import softmax
from sublight.fix.patch.rules.softmax import SOFTMAX


class Spelled(nn.Module):
    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)


class Widened(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1, dtype=torch.float32)


@pytest.mark.parametrize(
    ("module", "shapes"),
    [
        (nn.Softmax(-1), [(5,), (3, 5), (2, 3, 5)]),
        (nn.LogSoftmax(-1), [(3, 5), (2, 3, 5)]),
        (nn.Softmax(1), [(3, 5), (2, 3, 5)]),  # the last one of a matrix, not of the second
        (Spelled(), [(3, 5), (2, 2, 3, 5)]),
    ],
)
def test_values_and_gradients(module: Any, shapes: list[tuple[int, ...]]) -> None:
    other = copy.deepcopy(module)
    assert patch(module, rules=(SOFTMAX,)).swapped == 1
    for shape in shapes:
        ours = torch.randn(shape).requires_grad_()
        theirs = ours.detach().clone().requires_grad_()
        module(ours).square().sum().backward()
        other(theirs).square().sum().backward()
        torch.testing.assert_close(module(ours), other(theirs))
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_which_ranks_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setitem(softmax.OPS, "softmax", lambda x: heard.append(x) or x)
    module = nn.Softmax(1)
    patch(module, rules=(SOFTMAX,))
    module(torch.randn(2, 3)), module(torch.randn(2, 3, 4)), module(input=torch.randn(2, 3))
    assert len(heard) == 1


@pytest.mark.parametrize("module", [nn.Softmax(0), nn.LogSoftmax(-2), Widened()])
def test_what_is_left(module: Any) -> None:
    assert isinstance(softmax.find(module, nn.Linear(3, 3).bfloat16()), Left)


@pytest.mark.parametrize("module", [nn.Identity(), nn.GELU(), nn.Dropout(), nn.Softmax2d(), nn.Linear(3, 3)], ids=str)
def test_others_are_none(module: Any) -> None:
    answer = softmax.find(module, module)
    assert answer is None
