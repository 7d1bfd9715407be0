"""Linear layers with odd sizes: the same values and gradients; others are left or not looked at."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn

from sublight.fix.patch.model import patch, unpatch
from sublight.fix.patch.record import Left, Swap
from sublight.fix.patch.rules.linear import LINEAR
from sublight.fix.patch.rules.linear import find as found


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(7, 16))


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(7, 16), Swap),
        (nn.Linear(16, 9, bias=False), Swap),
        (nn.Linear(16, 24), type(None)),  # even sizes
        (Scaled(7, 16), type(None)),
        (nn.Bilinear(7, 7, 9), type(None)),
        (parametrized(), (Left, type(None))),
    ],
)
def test_which_are_taken(module: Any, kind: Any) -> None:
    assert isinstance(found(module, module), kind)


def test_values_gradients_autocast_and_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 9, bias=False))
    theirs, x = copy.deepcopy(model), torch.randn(5, 12)
    done = patch(model, rules=(LINEAR,))
    assert {name for row in done.rows if row.rule == "linear" for name in row.names} == {"0", "2"}
    for each in (model, theirs):
        each(x).square().sum().backward()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)
    torch.testing.assert_close(model(x), theirs(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), theirs(x)) and model(x).dtype == torch.bfloat16
    with pytest.raises(RuntimeError):
        model(x.double())
    unpatch(model)
    assert torch.equal(model(x), theirs(x))


def test_a_spectral_norm_takes_no_step_while_it_is_looked_at() -> None:
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(7, 16))
    before = {name: x.clone() for name, x in normed.state_dict().items()}
    patch(normed, rules=(LINEAR,))
    assert all(torch.equal(x, before[name]) for name, x in normed.state_dict().items())


def test_a_layer_whose_weight_comes_later_is_left() -> None:
    layer = nn.Linear(7, 16)
    layer.weight = None  # type: ignore[assignment]
    assert isinstance(found(layer, layer), Left)
