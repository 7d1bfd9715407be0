"""The check of figures, on explanations that are wrong: each kind of contradiction is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sublight.diagnose import explain as module
from sublight.diagnose import fakes
from sublight.diagnose.consistency import contradictions
from sublight.diagnose.fakes import BIG, Machine
from sublight.diagnose.record import Explanation, Finding
from sublight.diagnose.replay_test import steps
from sublight.results import Limits, write_json

Change = Callable[[Explanation], Explanation]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    """A step that loads, waits and has a slow kernel."""

    def body(m: Machine) -> None:
        m.load(1000.0)
        m.lookups(5, 100.0)
        m.op("aten::relu", BIG, us=1000.0)
        m.item()

    path = tmp_path_factory.mktemp("limits") / "limits.json"
    write_json(fakes.limits().to_json(), path)
    return module.explain([steps(body)], limits_file=str(path))


def with_first(**changes: Any) -> Change:
    """Of the findings, the first changed."""

    def change(found: Explanation) -> Explanation:
        first: Finding = replace(found.findings[0], **changes)
        return replace(found, findings=(first, *found.findings[1:]))

    return change


def with_parts(**changes: float) -> Change:
    return lambda found: replace(found, breakdown={**found.breakdown, **changes})


def with_op(**changes: Any) -> Change:
    return lambda found: replace(found, ops=(replace(found.ops[0], **changes), *found.ops[1:]))


WRONG: dict[str, tuple[Change, str]] = {
    "parts that do not add up": (with_parts(data=5.0), "the parts add up to"),
    "less than nothing": (with_parts(python=-1e-3), "less than nothing"),
    "a part too many": (lambda found: replace(found, breakdown={**found.breakdown, "more": 0.0}), "are not those"),
    "no step": (lambda found: replace(found, step_s=0.0), "a step of 0"),
    "uneven steps": (lambda found: replace(found, step_spread_s=found.step_s), "without a word"),
    "less left than the floor": (lambda found: replace(found, combined_saving_s=found.step_s), "less than the floor"),
    "a floor above the step": (lambda found: replace(found, op_floor_s=2 * found.step_s), "the ops' floor is"),
    "a floor above the ops'": (lambda found: replace(found, floor_s=found.op_floor_s * 2), "above the ops' own"),
    "a floor that rises": (lambda found: replace(found, fixed_floor_s=2 * found.floor_s), "the floor rises"),
    "100 % of the limit, and idle": (
        lambda found: replace(found, floor_s=found.step_s, op_floor_s=found.step_s),
        "of the limit in a step that is idle",
    ),
    "findings out of order": (lambda found: replace(found, findings=found.findings[::-1]), "not in order"),
    "together more than alone": (lambda found: replace(found, combined_saving_s=9.0), "together 9.0 s"),
    "a finding twice": (lambda found: replace(found, findings=(found.findings[0], *found.findings)), "stands twice"),
    "more saved than there is": (with_first(saving_s=1.0), "saves 1.0 s"),
    "too little to show": (with_first(saving_s=1e-9), "too little to be shown"),
    "0 calls a step": (with_first(evidence=("0 calls a step",)), "counts nothing"),
    "a figure that is none": (with_first(title="it takes nan ms a step"), "holds no number"),
    "more than the step": (with_first(evidence=("as they are 725 ms a step",)), "more than the step in it"),
    "no words": (with_first(title=""), "lacks its words"),
    "another verdict": (lambda found: replace(found, verdict="host-bound"), "the verdict is host-bound"),
    "healthy on an idle device": (
        lambda found: replace(
            found,
            verdict="healthy",
            findings=(),
            combined_saving_s=0.0,
            breakdown={name: found.step_s if name == "other" else 0.0 for name in found.breakdown},
        ),
        "healthy on an idle device",
    ),
    "a sure voice": (lambda found: replace(found, unsure=True, caveats=("so",)), "in a sure voice"),
    "a doubt without a reason": (lambda found: replace(found, unsure=True), "without its reason"),
    "too much device time": (with_op(device_s=0.355), "of device time in a step"),
    "a row of no calls": (with_op(calls=0.0), "0.0 calls"),
    "beyond the limit, and nobody says so": (with_op(floor_s=1.0), "nobody says that this cannot be"),
    "two lines of words": (lambda found: replace(found, sentence="a\nb"), "the sentence is none"),
    "said twice": (lambda found: replace(found, caveats=("a",), notes=("a",)), "said twice"),
}  # fmt: skip


def test_a_right_one_has_none(right: Explanation) -> None:
    assert contradictions(right) == []
    assert len(right.findings) > 1 and right.fraction is not None


@pytest.mark.parametrize("name", WRONG)
def test_each_contradiction_is_seen(name: str, right: Explanation) -> None:
    change, words = WRONG[name]
    assert any(words in line for line in contradictions(change(right))), contradictions(change(right))


def test_a_fraction_of_an_unknown_floor_is_none(right: Explanation) -> None:
    nothing = Limits(device="x", kind="cuda", limits=())
    assert replace(right, limits=nothing).fraction is None
    unknown = {**right.breakdown, "unknown": right.breakdown["floor"], "floor": 0.0}
    assert replace(right, breakdown=unknown).fraction is None
