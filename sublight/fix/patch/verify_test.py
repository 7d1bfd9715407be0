"""A swap that is wrong is undone and reported, a right one passes, and nothing else is changed by the looking."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.fix.patch.model import is_patched, patch
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.rules.norm import NORM
from sublight.fix.patch.trials import batch, count, model


def wrong_rule(eps: float) -> Rule:
    """LayerNorm with another eps."""

    def find(module: Any, whole: Any) -> Swap | Left | None:
        told = NORM.find(module, whole)
        if not isinstance(told, Swap):
            return told

        def forward(self: Any, x: Any) -> Any:
            return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps)

        return dataclasses.replace(told, rule="wrong", forward=forward)

    return Rule(name="wrong", find=find)


def test_a_right_swap_passes_verification(always_wins: None) -> None:
    found = model()
    told = patch(found, verify=batch())
    assert told.verdict and told.verdict.is_right and count(found) == 3
    assert len(told.verdict.errors) == 1 + len(list(found.parameters())), "the output and every gradient"
    assert told.to_json()["is_right"] is True


def test_a_wrong_swap_is_undone_and_reported(always_wins: None) -> None:
    found, x = model(), batch()
    expected = found(x)
    told = patch(found, verify=x, rules=(wrong_rule(0.5),))
    assert count(found) == 0 and torch.equal(found(x), expected)
    assert told.swapped == 0 and told.rows[0].reason.startswith("undone: ")
    assert "of 11 beyond 2 times PyTorch's error" in told.rows[0].reason
    assert told.verdict and told.verdict.is_right, "what is left is as it was"


def test_only_the_wrong_rule_is_undone(always_wins: None) -> None:
    found = model()
    found[2].eps = 1e-4  # unlike the others, so that it is looked at by itself
    good = Rule(name="norm", find=lambda module, whole: None if module is found[2] else NORM.find(module, whole))
    told = patch(found, verify=batch(), rules=(good, wrong_rule(0.5)))
    assert {row.rule: row.is_swapped for row in told.rows} == {"norm": True, "wrong": False}
    assert is_patched(found[0].norm) and not is_patched(found[2])
    assert told.verdict and told.verdict.is_right


def test_verification_leaves_gradients_modes_and_random_numbers(always_wins: None) -> None:
    found, x = model(), batch()
    found.train()
    found[0].eval()
    found[2].weight.grad = torch.full((16,), 7.0)
    state = torch.get_rng_state()
    patch(found, verify=x)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.training and not found[0].training
    assert bool((found[2].weight.grad == 7).all()) and found[2].bias.grad is None
