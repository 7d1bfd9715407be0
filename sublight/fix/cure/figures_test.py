"""Losses where a script trains, outputs where it does not; few of them, and wrong ones are seen."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.fix.cure.figures import LOSSES, OUTPUTS, Figures, difference, tensors

pytestmark = pytest.mark.usefixtures("own_models")


def test_losses_of_a_script_that_trains() -> None:
    figures, own = Figures(), torch.Tensor.backward
    with figures.watch():
        net = torch.nn.Linear(4, 1)
        given = [net(torch.ones(1, 4)).square().mean() * number for number in range(1, LOSSES + 3)]
        for loss in given:
            loss.backward()
    values, figures_of = figures.read()
    assert figures_of == "losses" and values == [loss.item() for loss in given[:LOSSES]]
    assert torch.Tensor.backward is own and not figures.low_precision


def test_outputs_of_a_script_that_does_not() -> None:
    figures = Figures()
    with figures.watch(), torch.no_grad():
        net = torch.nn.Linear(4, 4).bfloat16()
        for _ in range(OUTPUTS + 3):
            out = net(torch.ones(2, 4, dtype=torch.bfloat16))
    values, figures_of = figures.read()
    assert figures_of == "outputs" and len(values) == OUTPUTS and figures.low_precision
    assert values[0] == pytest.approx(out.double().abs().mean().item())
    assert not net._forward_hooks, "the hook left when it had seen enough"


def test_nothing_to_compare() -> None:
    assert Figures().read() == ([], "")


@pytest.mark.parametrize(
    ("before", "after", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.2], 0.1),
        ([1.0], [math.nan], math.inf),
        ([math.nan], [math.nan], 0.0),
        ([0.0], [1.0], math.inf),
    ],
)
def test_difference(before: list[float], after: list[float], apart: float) -> None:
    found = difference(before, after)
    assert found == pytest.approx(apart) or (found is not None and found > 1e20 and apart == math.inf)


def test_tensors_of_what_a_model_gives() -> None:
    x: Any = torch.ones(1)
    assert len(tensors({"a": x, "b": (x, [x]), "c": 3})) == 3 and tensors(x) == [x] and tensors(None) == []
