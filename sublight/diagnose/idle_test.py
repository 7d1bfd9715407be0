"""A device that idles is no healthy one: the largest idle part is named, whatever it is, unless a finding names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sublight.diagnose import explain as module
from sublight.diagnose import fakes, idle
from sublight.diagnose.consistency import contradictions
from sublight.diagnose.fakes import Machine
from sublight.diagnose.record import BREAKDOWN, BUSY
from sublight.diagnose.replay_test import products, steps


def only_copies(m: Machine) -> None:
    """Nothing to hide them behind: a stream of their own would save nothing."""
    m.copy(900.0, 50_000_000, "Pinned")
    products(m, 1, 20.0)


def waiting_for_nobody_knows_what(m: Machine) -> None:
    products(m, 5, 50.0)
    m.free[0] += 900.0
    products(m, 5, 50.0)


@pytest.mark.parametrize(
    ("body", "part", "why"),
    [
        (only_copies, "copy", "copies run with no kernel beside them"),
        (waiting_for_nobody_knows_what, "other", "it waits for something that the trace does not show"),
    ],
)
def test_the_largest_idle_part_is_the_verdict(body: Callable[[Machine], Any], part: str, why: str) -> None:
    found = module.explain([steps(body)], gpu="h200")
    assert contradictions(found) == []
    assert found.verdict == idle.ID and why in found.findings[0].title
    assert found.findings[0].saving_s == pytest.approx(found.breakdown[part], rel=0.05)
    assert any(line.startswith("a gap of") for line in found.findings[0].evidence)


def test_a_part_that_a_finding_names_is_not_named_again() -> None:
    found = module.explain([steps(lambda m: (m.load(3000.0), products(m, 5, 50.0)))], gpu="h200")
    assert found.verdict == "data-loading" and idle.ID not in {finding.id for finding in found.findings}


@pytest.mark.parametrize("wait", [lambda m: m.load(3000.0, "_MultiProcessingDataLoader"), lambda m: m.python(3000.0)])
def test_a_start_of_workers_is_named_once(wait: Callable[[Machine], None]) -> None:
    """The loader's call, or the line before it, waits for workers that start, and a finding says so."""
    case = fakes.case(steps(lambda m: (wait(m), products(m, 5, 50.0))))
    assert idle.unexplained(case, case.model, ["unfused-norm"], case.step_s) is not None
    assert idle.unexplained(case, case.model, ["worker-restart"], case.step_s) is None


def test_a_busy_device_is_healthy() -> None:
    found = module.explain([steps(lambda m: m.lookups(20, 110.0))], gpu="h200")
    assert found.verdict == "healthy" and found.idle_s < 0.1 * found.step_s


def test_every_idle_part_has_its_words() -> None:
    assert set(idle._WHY) == set(BREAKDOWN) - set(BUSY)
    assert set(idle.EXPLAINED) <= set(idle._WHY)
