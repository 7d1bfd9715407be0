"""Every way that divides is tried, the best meets the target, and what cannot be is not offered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublight.errors import BadInput
from sublight.predict import config, estimate, machine, plan
from sublight.predict.step import Step

H100 = machine.find("h100")
DECODE = Step(mode="decode", batch=1, context=4096)


def test_ways_use_all_gpus_and_divide_the_model() -> None:
    found = list(plan.ways(config.load("llama-3-70b"), 16))
    assert all(way.gpus == 16 and 64 % way.tensor == 0 and way.tensor <= 8 and way.expert == 1 for way in found)
    assert len(found) == len(set(found)) == 14
    spread = {way.expert for way in plan.ways(config.load("mixtral-8x7b"), 8)}
    assert spread == {1, 2, 4, 8}
    assert [way.data for way in plan.ways(config.load("resnet-50"), 4)] == [4]


def test_the_best_plan_meets_the_target_and_none_that_does_is_faster() -> None:
    found = plan.plans(config.load("llama-3-70b"), H100, DECODE, 8, latency_s=0.03)
    meeting = [each for each in found if each.meets]
    assert meeting and found[0] in meeting and all(each.prediction.fits for each in found)
    assert all(each.prediction.expected_s <= 0.03 for each in meeting)
    rates = [each.prediction.tokens_per_s for each in meeting]
    assert rates == sorted(rates, reverse=True)


def test_no_batch_that_holds_the_target_gives_more_tokens_than_the_best_plan() -> None:
    """Not a power of two alone: every batch of the best split is tried here."""
    model = config.load("llama-3-70b")
    best = plan.plans(model, H100, DECODE, 8, latency_s=0.03)[0]
    every = (
        estimate.predict(model, H100, replace(DECODE, batch=batch, parallel=best.parallel)) for batch in range(1, 300)
    )
    most = max(each.tokens_per_s for each in every if each.fits and each.expected_s <= 0.03)
    assert best.meets and most / 1.03 < best.prediction.tokens_per_s <= most


def test_a_looser_target_never_gives_fewer_tokens() -> None:
    model = config.load("llama-3-70b")
    rates = [
        plan.plans(model, H100, DECODE, 8, latency_s=seconds)[0].prediction.tokens_per_s
        for seconds in (0.02, 0.03, 0.1)
    ]
    assert rates == sorted(rates)


def test_a_target_that_nothing_meets() -> None:
    found = plan.plans(config.load("llama-3-70b"), H100, DECODE, 8, latency_s=1e-4)
    assert found and not any(each.meets for each in found)
    times = [each.prediction.expected_s for each in found]
    assert times == sorted(times)


def test_what_does_not_fit_is_no_plan() -> None:
    assert plan.plans(config.load("llama-3.1-405b"), H100, DECODE, 2) == ()


def test_more_than_one_machine_needs_a_network() -> None:
    model, wide = config.load("llama-3-70b"), replace(H100, network_bytes_per_s=50e9)
    with pytest.raises(BadInput, match="give --network"):
        plan.plans(model, H100, DECODE, 16)
    slow, fast = (
        plan.plans(
            model, replace(H100, network_bytes_per_s=rate), replace(DECODE, mode="train", context=256), 64, batch=64
        )
        for rate in (5e9, 50e9)
    )
    times = {each.parallel: each.prediction.expected_s for each in fast}
    assert slow and all(each.prediction.expected_s >= times[each.parallel] for each in slow)
    assert plan.plans(model, wide, DECODE, 16)


def test_data_parallel_gives_more_tokens_and_not_more_latency() -> None:
    from sublight.predict.step import Parallel

    model = config.load("llama-3-8b")
    one = estimate.predict(model, H100, replace(DECODE, batch=8))
    two = estimate.predict(model, H100, replace(DECODE, batch=16, parallel=Parallel(data=2)))
    assert two.expected_s == pytest.approx(one.expected_s) and two.tokens_per_s == pytest.approx(2 * one.tokens_per_s)
    assert two.joules_per_token == pytest.approx(one.joules_per_token) and two.mfu == pytest.approx(one.mfu)
