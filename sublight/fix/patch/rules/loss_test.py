"""nn.CrossEntropyLoss with all its options; calls of other shapes get its own forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from sublight.fix.patch.model import patch
from sublight.fix.patch.record import Left
from sublight.fix.patch.rules import loss
from sublight.fix.patch.rules.loss import LOSS


class Halved(nn.CrossEntropyLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input, target) / 2


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1},
                                     {"ignore_index": 2}], ids=str)  # fmt: skip
def test_values_and_gradients(options: dict[str, Any]) -> None:
    module = nn.CrossEntropyLoss(**options)
    other = copy.deepcopy(module)
    assert patch(module, rules=(LOSS,)).swapped == 1
    ours = torch.randn(7, 11).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    labels = torch.tensor([0, 2, 10, 2, 5, -100, 1]) if "ignore_index" not in options else torch.arange(7)
    one, another = module(ours, labels), other(input=theirs, target=labels)
    one.sum().backward(), another.sum().backward()
    torch.testing.assert_close(one, another)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_other_calls_get_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(loss, "cross_entropy", lambda logits, labels, **rest: heard.append(rest) or logits.sum())
    module, other = nn.CrossEntropyLoss(), nn.CrossEntropyLoss()
    patch(module, rules=(LOSS,))
    for logits, labels in (
        (torch.randn(2, 5, 3), torch.randint(0, 5, (2, 3))),  # classes along the second dimension
        (torch.randn(4, 5), torch.rand(4, 5)),  # shares
        (torch.randn(5), torch.tensor(3)),
    ):
        torch.testing.assert_close(module(logits, labels), other(logits, labels))
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(4, 5).bfloat16(), torch.randint(0, 5, (4,)))
    assert not heard
    module(target=torch.randint(0, 5, (4,)), input=torch.randn(4, 5))
    assert len(heard) == 1


@pytest.mark.parametrize("module", [nn.CrossEntropyLoss(weight=torch.rand(3)), Halved()])
def test_what_is_left(module: Any) -> None:
    assert isinstance(loss.find(module, module), Left)


def test_others_are_none() -> None:
    assert loss.find(nn.NLLLoss(), nn.Module()) is None
