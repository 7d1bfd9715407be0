"""Masks: how many and which are left, that they hold through training, rewinding, random ones, two of four."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.errors import BadInput
from sublight.fix import prune


def made() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.ReLU(), torch.nn.Linear(20, 4))


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_the_smallest_go(scope: Any) -> None:
    model = made()
    model[2].weight.data *= 100
    masks = prune.without_smallest(model, prune.all_weights(model), 0.25, scope=scope)
    left = [int(masks[f"{layer}.weight"].sum()) for layer in (0, 2)]
    assert left == ([180, 60] if scope == "layer" else [160, 80])
    for layer in (0, 2):
        weight, mask = model[layer].weight.detach().abs(), masks[f"{layer}.weight"]
        assert mask.all() or weight[~mask].max() <= weight[mask].min()
    again = prune.without_smallest(model, masks, 0.5, scope=scope)
    assert prune.share_left(again) == 0.375
    assert all((again[name] <= masks[name]).all() for name in masks)  # what is gone does not come back


def test_equal_weights_go_from_the_end() -> None:
    model = made()
    model[0].weight.data.fill_(1.0)
    mask = prune.without_smallest(model, prune.all_weights(model), 0.5)["0.weight"].flatten()
    assert mask[:120].all() and not mask[120:].any()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_what_is_gone_stays_zero_while_the_rest_learns(kind: Any) -> None:
    model, x = made(), torch.randn(30, 12)
    masks = prune.without_smallest(model, prune.all_weights(model), 0.5)
    before = model[0].weight.detach().clone()
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
    with prune.held(model, masks, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            assert not model[0].weight[~masks["0.weight"]].any()
    assert (model[0].weight != before)[masks["0.weight"]].all()
    optimizer.step()  # nobody holds it any more
    assert model[0].weight[~masks["0.weight"]].any()


def test_rounds_set_what_is_left_back() -> None:
    model = made()
    first = copy.deepcopy(model.state_dict())
    begun = []

    def train(model: Any, masks: prune.Masks) -> float:
        begun.append((copy.deepcopy(model.state_dict()), masks))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        return float(len(begun))

    found = list(prune.rounds(model, train, count=3, share=0.5))
    assert [each.score for each in found] == [1, 2, 3] and [each.left for each in found] == [1, 0.5, 0.25]
    assert all(torch.equal(state[name], first[name]) for state, _ in begun for name in first)
    assert all(each.masks is masks for each, (_, masks) in zip(found, begun, strict=True))


def test_random_places_are_as_many() -> None:
    model = made()
    masks = prune.without_smallest(model, prune.all_weights(model), 0.3)
    other = prune.shuffled(masks, torch.Generator().manual_seed(0))
    assert all(other[name].sum() == masks[name].sum() and not torch.equal(other[name], masks[name]) for name in masks)


def test_two_of_four() -> None:
    model = made()
    masks = prune.two_of_four(model, prune.all_weights(model))
    for name, mask in masks.items():
        fours, sizes = mask.view(-1, 4), model.get_parameter(name).detach().abs().view(-1, 4)
        assert (fours.sum(1) == 2).all()
        smallest_left = sizes.masked_fill(~fours, torch.inf).amin(1)
        assert (smallest_left >= sizes.masked_fill(fours, 0).amax(1)).all()


def test_bad_input_is_refused_in_one_line() -> None:
    model = made()
    for call, words in (
        (lambda: prune.all_weights(model, skip=("head",)), "names no module"),
        (lambda: prune.all_weights(torch.nn.ReLU()), "nothing to prune"),
        (lambda: prune.without_smallest(model, prune.all_weights(model), 1.0), "share is 1.0"),
        (lambda: list(prune.rounds(model, lambda *_: 0.0, count=0, share=0.5)), "at least one round"),
    ):
        with pytest.raises(BadInput, match=words):
            call()
    assert set(prune.all_weights(model, skip=("2",))) == {"0.weight"}
