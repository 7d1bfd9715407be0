"""Activations by their values: both gelus and relu² in every spelling, and none that is only near."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import nn

from sublight.fix.patch.model import patch, unpatch
from sublight.fix.patch.record import Left, Swap
from sublight.fix.patch.rules import activation
from sublight.fix.patch.rules.activation import ACTIVATION


class Spelled(nn.Module):
    """gelu by tanh as GPT-2 writes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x).square()


class Quick(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


class Clipped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x).clip(-10, 10)


class Widened(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x.to(torch.promote_types(x.dtype, torch.float32)))


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(x), 0.5, self.training)


@pytest.mark.parametrize(
    ("module", "op"),
    [(nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (Spelled(), "gelu_tanh"), (Squared(), "relu2")],
)
def test_which_activation_it_is(module: Any, op: str) -> None:
    answer = activation.find(module, module)
    assert isinstance(answer, Swap) and answer.op == op
    other = copy.deepcopy(module)
    assert patch(module, rules=(ACTIVATION,)).swapped == 1
    ours, theirs = (torch.linspace(-6, 6, 99).requires_grad_() for _ in range(2))
    module(ours).square().sum().backward()
    other(theirs).square().sum().backward()
    torch.testing.assert_close(module(ours), other(theirs))
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(module(x=ours) if op == "relu2" else module(ours), other(theirs))
    assert unpatch(module) == 1


@pytest.mark.parametrize("module", [nn.SiLU(), nn.ReLU(), nn.Identity(), nn.Dropout(), nn.Flatten(), nn.Softmax(-1),
                                    Quick(), Clipped(), Noisy(), nn.MSELoss(), nn.PReLU(), nn.Sequential(nn.GELU())],
                         ids=lambda module: type(module).__name__)  # fmt: skip
def test_others_are_none(module: Any) -> None:
    assert activation.find(module, module) is None


def test_one_that_widens_is_left() -> None:
    answer = activation.find(Widened(), nn.Linear(3, 3).bfloat16())
    assert isinstance(answer, Left) and "data type" in answer.reason


@pytest.mark.parametrize(("module", "calls"), [(nn.GELU("tanh"), 2), (Spelled(), 1)])
def test_autocast_widens_powers(module: Any, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU autocast makes float32 of `pow`: such a module keeps its own forward for 16-bit tensors."""
    heard: list[Any] = []
    monkeypatch.setitem(activation.OPS, "gelu_tanh", lambda x: heard.append(x) or x)
    patch(module, rules=(ACTIVATION,))
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(3))
        module(torch.randn(3).bfloat16())
    assert len(heard) == calls


def test_hugging_faces() -> None:
    activations = pytest.importorskip("transformers.activations")
    expected = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
                "relu2": "relu2", "quick_gelu": None, "silu": None, "gelu_10": None, "mish": None}  # fmt: skip
    found = {name: activation.find(activations.ACT2FN[name], nn.Module()) for name in expected}
    assert {name: getattr(told, "op", None) for name, told in found.items()} == expected


@pytest.mark.gpu
@pytest.mark.parametrize("module", [nn.GELU(), nn.GELU("tanh"), Spelled(), Squared()])
def test_on_the_gpu(module: Any) -> None:
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    expected = module(x.double())
    theirs = module(x)
    assert patch(module, x, rules=(ACTIVATION,)).swapped == 1
    assert (module(x) - expected).abs().max() <= 2 * (theirs - expected).abs().max()
    unpatch(module)
