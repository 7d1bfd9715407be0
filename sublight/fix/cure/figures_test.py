"""Losses where a script trains, outputs where it does not; few of them, and wrong ones are seen."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_post_hook

from sublight.fix.cure.figures import LOSSES, OUTPUTS, Figures, difference, tensors

pytestmark = pytest.mark.usefixtures("own_models")


def test_losses_of_a_script_that_trains() -> None:
    figures, own = Figures(), torch.Tensor.backward
    with figures.watch():
        net = torch.nn.Linear(4, 1)
        given = [net(torch.ones(1, 4)).square().mean() * number for number in range(1, LOSSES + 3)]
        step = torch.optim.SGD(net.parameters(), lr=0.0).step
        for loss in given:
            loss.backward()
            step()
    values, figures_of = figures.read()
    assert figures_of == "losses" and values == [loss.item() for loss in given[:LOSSES]]
    assert torch.Tensor.backward is own and not figures.low_precision


def test_losses_until_the_optimizer_has_made_its_steps() -> None:
    """What an optimizer does wrong shows only in the losses after its step: here one in four."""
    figures, others = Figures(), []
    with figures.watch():
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        handle = register_optimizer_step_post_hook(lambda *args: others.append(args))
        for number in range(1, 21):
            net(torch.ones(1, 4)).square().mean().backward()
            if number % 4 == 0:
                optimizer.step()
        handle.remove()
    assert len(figures.read()[0]) == 12 and len(others) == 5, "a script's own hooks are called as ever"


def test_outputs_with_gradients_on_that_nobody_asks_for() -> None:
    figures = Figures()
    with figures.watch():
        net = torch.nn.Linear(4, 4)
        for _ in range(3):
            net(torch.ones(2, 4))
    values, figures_of = figures.read()
    assert figures_of == "outputs" and len(values) == 3


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
    assert difference([math.nan], [math.nan]) is None, "two runs that both fail prove nothing"


@pytest.mark.parametrize(
    ("before", "after", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.2], 0.1),
        ([1.0], [math.nan], math.inf),
        ([math.nan, 1.0], [math.nan, 1.1], 0.1),
        ([0.0], [1.0], math.inf),
    ],
)
def test_difference(before: list[float], after: list[float], apart: float) -> None:
    found = difference(before, after)
    assert found == pytest.approx(apart) or (found is not None and found > 1e20 and apart == math.inf)


def test_tensors_of_what_a_model_gives() -> None:
    x: Any = torch.ones(1)
    assert len(tensors({"a": x, "b": (x, [x]), "c": 3})) == 3 and tensors(x) == [x] and tensors(None) == []
