"""A swap that is wrong is undone and reported, a right one passes, and nothing else is changed by the looking."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.fix.patch import verify as verifying
from sublight.fix.patch.model import is_patched, patch
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.rules.norm import NORM
from sublight.fix.patch.trials import batch, count, model


def wrong_rule(eps: float) -> Rule:
    """LayerNorm with another eps."""

    def find(module: Any, whole: Any) -> Swap | Left | None:
        answer = NORM.find(module, whole)
        if not isinstance(answer, Swap):
            return answer

        def forward(self: Any, x: Any) -> Any:
            return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, eps)

        return dataclasses.replace(answer, rule="wrong", forward=forward)

    return Rule(name="wrong", find=find)


def test_a_right_swap_passes_verification(always_wins: None) -> None:
    found = model()
    report = patch(found, verify=batch())
    assert report.verdict and report.verdict.is_right and count(found) == 3
    assert len(report.verdict.errors) == 1 + len(list(found.parameters())), "the output and every gradient"
    assert report.to_json()["is_right"] is True


def test_a_wrong_swap_is_undone_and_reported(always_wins: None) -> None:
    found, x = model(), batch()
    expected = found(x)
    report = patch(found, verify=x, rules=(wrong_rule(0.5),))
    assert count(found) == 0 and torch.equal(found(x), expected)
    assert report.swapped == 0 and report.rows[0].reason.startswith("undone: ")
    assert "of 11 beyond 2 times PyTorch's error" in report.rows[0].reason
    assert report.verdict and report.verdict.is_right, "what is left is as it was"


def test_only_the_wrong_rule_is_undone(always_wins: None) -> None:
    found = model()
    found[2].eps = 1e-4  # unlike the others, so that it is looked at by itself
    good = Rule(name="norm", find=lambda module, whole: None if module is found[2] else NORM.find(module, whole))
    report = patch(found, verify=batch(), rules=(good, wrong_rule(0.5)))
    assert {row.rule: row.is_swapped for row in report.rows} == {"norm": True, "wrong": False}
    assert is_patched(found[0].norm) and not is_patched(found[2])
    assert report.verdict and report.verdict.is_right


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


class Scalar(torch.nn.Module):
    """Gives one number, which PyTorch may have exactly by luck."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x: Any) -> Any:
        return (self.norm(x) * x).mean()


def right_rule(name: str = "right") -> Rule:
    """LayerNorm in another order of operations, as right as PyTorch's."""

    def find(module: Any, whole: Any) -> Swap | Left | None:
        answer = NORM.find(module, whole)
        if not isinstance(answer, Swap):
            return answer

        def forward(self: Any, x: Any) -> Any:
            centred = x - x.flip(-1).mean(-1, keepdim=True)
            scale = torch.rsqrt(centred.flip(-1).square().mean(-1, keepdim=True) + self.eps)
            return centred * scale * self.weight + self.bias

        return dataclasses.replace(answer, rule=name, forward=forward)

    return Rule(name=name, find=find)


SEEDS = 8


def kept(seed: int) -> bool:
    torch.manual_seed(seed)
    found = Scalar()
    report = patch(found, verify=torch.randn(4, 16), rules=(right_rule(),))
    return bool(report.swapped)


def test_luck_of_pytorchs_accuses_nobody(always_wins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(kept(seed) for seed in range(SEEDS))
    monkeypatch.setattr(verifying, "with_draws", lambda known, model, batch: known)
    assert not all(kept(seed) for seed in range(SEEDS)), "one draw alone would accuse: else this shows nothing"


class Insensitive(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    """Gives a number that no last digit of its parameters changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return (self.weight * x).sum() * 1e-12 + 4.0


def test_a_single_number_may_be_off_by_a_digit() -> None:
    found, x = Insensitive(), torch.ones(4)
    known = verifying.with_draws(verifying.baseline(found, x), found, x)

    def is_right(off: int) -> bool:
        moved = known.plain.outputs["output"] * (1 + off * torch.finfo(torch.float32).eps)
        return known.judge(dataclasses.replace(known.plain, outputs={"output": moved})).is_right

    assert is_right(0) and is_right(1) and is_right(-1) and not is_right(8)


def test_who_is_right_beside_a_wrong_one_is_not_blamed(always_wins: None) -> None:
    found = model()
    found[2].eps = 1e-4  # unlike the others, so that it is looked at by itself
    right = right_rule()
    good = Rule(name="right", find=lambda module, whole: None if module is found[2] else right.find(module, whole))
    report = patch(found, verify=batch(), rules=(good, wrong_rule(0.5)))
    assert {row.rule: row.is_swapped for row in report.rows} == {"right": True, "wrong": False}


def test_a_gradient_that_is_lost_is_an_error(always_wins: None) -> None:
    def find(module: Any, whole: Any) -> Swap | Left | None:
        if not isinstance(module, torch.nn.LayerNorm):
            return None

        def forward(self: Any, x: Any) -> Any:
            return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight.detach(), self.bias, self.eps)

        return Swap(rule="drops", forward=forward)

    report = patch(model(), verify=batch(), rules=(Rule(name="drops", find=find),))
    (row,) = report.rows
    assert not row.is_swapped and row.reason.startswith("undone: gradient of ") and "only" in row.reason
