"""A swap that costs time is undone, one that pays stays; a step is timed and the model left as it was."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.fix.patch import pay
from sublight.fix.patch.model import patch
from sublight.fix.patch.pay import Timed
from sublight.fix.patch.trials import batch, count, model
from sublight.results import Samples


def timings(monkeypatch: pytest.MonkeyPatch, found: Any, cost_s: float) -> None:
    """A step takes 10 ms, and so much more or less for every module of ours."""

    def timed(model: Any, batch: Any) -> Timed:
        step_s = 0.010 + cost_s * count(found)
        return Timed(samples=Samples(times_s=(step_s, 1.01 * step_s, 0.99 * step_s), method="wall"), peak_bytes=None)

    monkeypatch.setattr(pay, "timed", timed)


def test_a_swap_that_costs_time_is_undone(always_wins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = model()
    timings(monkeypatch, found, 0.002)
    report = patch(found, measure=batch())
    assert count(found) == 0
    assert report.rows[0].reason == "undone: it cost 6.00 ms a step"
    assert report.paid and report.paid.speedup == 1


def test_a_swap_that_pays_stays(always_wins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = model()
    timings(monkeypatch, found, -0.002)
    report = patch(found, measure=batch())
    assert count(found) == 3 and report.swapped == 3
    assert report.paid and report.paid.undone == () and report.paid.speedup == pytest.approx(2.5)


def test_a_real_step_is_timed_and_leaves_gradients() -> None:
    found = model()
    found[2].weight.grad = torch.full((16,), 7.0)
    result = pay.timed(found, batch(), time_limit_s=0.05)
    assert result.samples.n >= 3 and result.samples.median_s > 0 and result.peak_bytes is None
    assert bool((found[2].weight.grad == 7).all()) and found[2].bias.grad is None
