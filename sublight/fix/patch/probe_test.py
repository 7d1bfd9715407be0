"""Alike modules are looked at once; those that differ are not taken for alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sublight.fix.patch import candidate as patching
from sublight.fix.patch.model import patch


class Scaled(torch.nn.Module):
    """LayerNorm scaling: in the first layer it is a plain RMSNorm, in the others it is not."""

    def __init__(self, width: int, layer_idx: int) -> None:
        super().__init__()
        self.weight, self.layer_idx = torch.nn.Parameter(torch.ones(width)), layer_idx

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6) / math.sqrt(self.layer_idx + 1)


class Private(torch.nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = torch.nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self._eps)


class Mlp(torch.nn.Module):
    def __init__(self, width: int, layer_idx: int) -> None:
        super().__init__()
        self.gate, self.up = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, 2 * width)
        self.down, self.layer_idx = torch.nn.Linear(2 * width, width), layer_idx
        self.act = F.silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = F.relu if self.layer_idx % 2 else self.act
        return self.down(act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Layer(torch.nn.Module):
    def __init__(self, width: int, layer_idx: int) -> None:
        super().__init__()
        self.norm, self.lin, self.layer_idx = Scaled(width, layer_idx), torch.nn.Linear(width, width), layer_idx

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x)
        x = x + y
        return self.norm(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "model",
    [
        torch.nn.Sequential(*(Scaled(16, i) for i in range(4))),
        torch.nn.Sequential(*(Private(16, eps) for eps in (1e-6, 1e-1))),
        torch.nn.Sequential(*(Mlp(16, i) for i in range(4))),
        torch.nn.Sequential(*(Layer(16, i) for i in range(4))),
    ],
    ids=["norm", "private setting", "mlp", "norm of a layer"],
)
def test_layers_that_do_otherwise_by_their_number_or_setting_stay_right(model: torch.nn.Module) -> None:
    x = torch.randn(3, 16)
    before = model(x)
    assert patch(model).swapped
    torch.testing.assert_close(model(x), before)


def test_layers_that_differ_by_their_number_alone_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attention(torch.nn.Module):
        def __init__(self, layer_idx: int) -> None:
            super().__init__()
            self.lin, self.layer_idx = torch.nn.Linear(4, 4), layer_idx

    seen: list[Any] = []
    monkeypatch.setattr(patching, "_find", lambda module, *rest: seen.append(module))
    patch(torch.nn.Sequential(*(Attention(i) for i in range(5))))
    assert sum(isinstance(module, Attention) for module in seen) == 2  # by each of two kinds of rules
