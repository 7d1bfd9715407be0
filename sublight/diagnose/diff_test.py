"""Two explanations side by side: only what moved beyond noise is said."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from sublight.diagnose.diff import OF_STEP, diff
from sublight.diagnose.record import BREAKDOWN, Explanation, OpRow
from sublight.report.explain import fakes as explain_fakes

BEFORE = explain_fakes.explanation()
STEP_S = BEFORE.step_s
BIGGEST = BEFORE.ops[0]


def with_ops(*ops: OpRow, **more: Any) -> Explanation:
    return dataclasses.replace(BEFORE, ops=ops, **more)


def op(name: str, device_s: float, **more: Any) -> OpRow:
    return dataclasses.replace(BIGGEST, name=name, device_s=device_s, **more)


def spread(explanation: Explanation, relative: float) -> Explanation:
    return dataclasses.replace(explanation, step_spread_s=relative * explanation.step_s)


def test_nothing_moves_against_itself() -> None:
    found = diff(BEFORE, BEFORE)
    assert (found.step.verdict, found.ops, found.fixed, found.new) == ("same", (), (), ())
    assert list(found.parts) == list(BREAKDOWN)


@pytest.mark.parametrize(
    ("ratio", "relative", "verdict"),
    [
        (0.9, 0.0, "faster"),
        (1.1, 0.0, "slower"),
        (0.985, 0.0, "same"),  # 2 % is noise whatever the spread
        (0.975, 0.0, "faster"),
        (0.9, 0.02, "same"),  # 4 × √2 × 2 % is 11 %
        (0.85, 0.02, "faster"),
    ],
)
def test_the_step_beyond_noise(ratio: float, relative: float, verdict: str) -> None:
    after = dataclasses.replace(BEFORE, step_s=ratio * STEP_S)
    assert diff(spread(BEFORE, relative), spread(after, relative)).step.verdict == verdict


def test_two_programs_or_two_devices_are_doubted() -> None:
    assert diff(BEFORE, BEFORE).doubts == diff(with_ops(), BEFORE).doubts == ()
    same, other = op("aten::mm", 1e-3), op("aten::conv2d", 9e-3)
    assert diff(with_ops(same, other), with_ops(same)).doubts == (), "an op less"
    (doubt,) = diff(with_ops(same, other), with_ops(same, op("aten::bmm", 4e-3))).doubts
    assert doubt == "Hardly an op is in both (10 % of the time before, 20 % after): is it the same work?"
    (doubt,) = diff(BEFORE, dataclasses.replace(BEFORE, device="NVIDIA T4")).doubts
    assert doubt.startswith("The devices differ: ") and doubt.endswith("NVIDIA T4 after.")
    assert "NVIDIA T4 after" in json.dumps(diff(BEFORE, dataclasses.replace(BEFORE, device="NVIDIA T4")).to_json())


def test_ops_by_what_became_of_them() -> None:
    before = with_ops(op("a", 1e-3), op("b", 1e-3), op("c", 1e-3), op("d", 1e-3), op("e", 1e-3))
    after = with_ops(op("a", 1.01e-3), op("b", 2e-3), op("c", 0.5e-3), op("d", 1e-3), op("f", 3e-3))
    found = diff(before, after)
    assert [(change.name, change.verdict) for change in found.ops] == [
        ("f", "new"),
        *[("b", "slower"), ("e", "gone")],  # as much each
        ("c", "faster"),
    ]
    assert [change.change_s for change in found.ops] == pytest.approx([3e-3, 1e-3, -1e-3, -0.5e-3])


def test_a_change_too_small_for_the_step_is_not_shown() -> None:
    tiny = 0.9 * OF_STEP * STEP_S
    assert diff(with_ops(op("a", 1e-9)), with_ops(op("a", tiny))).ops == ()
    assert len(diff(with_ops(op("a", 1e-9)), with_ops(op("a", 1.2 * OF_STEP * STEP_S))).ops) == 1


def test_modules_together_shapes_and_types_apart() -> None:
    before = with_ops(op("a", 1e-3, module="x", calls=2), op("a", 2e-3, module="y", calls=3))
    after = with_ops(op("a", 1e-3, module="z", calls=1), op("a", 7e-3, shape="1x1"), op("a", 8e-3, dtype="other"))
    changes = {(change.shape, change.dtype): change for change in diff(before, after).ops}
    assert len(changes) == 3
    moved = changes[BIGGEST.shape, BIGGEST.dtype]
    assert (moved.before_s, moved.after_s, moved.calls) == (pytest.approx(3e-3), 1e-3, (5, 1))


def test_findings_that_are_gone_and_new() -> None:
    first, *others = BEFORE.findings
    renamed = dataclasses.replace(first, id="rank-imbalance")
    found = diff(BEFORE, dataclasses.replace(BEFORE, findings=(renamed, *others)))
    assert (found.fixed, found.new) == ((first.id,), ("rank-imbalance",))


def test_as_json() -> None:
    after = dataclasses.replace(BEFORE, step_s=STEP_S / 2, source="after.json", ops=BEFORE.ops[1:])
    data = json.loads(json.dumps(diff(BEFORE, after).to_json()))
    assert data["step_s"] == [STEP_S, STEP_S / 2] and data["verdict"] == "faster"
    assert data["after"] == "after.json" and set(data["breakdown"]) == set(BREAKDOWN)
    assert data["ops"][0]["verdict"] == "gone" and data["ops"][0]["after_s"] is None


def test_steps_of_no_length_are_no_error() -> None:
    nothing = dataclasses.replace(BEFORE, step_s=0.0, ops=())
    assert diff(BEFORE, nothing).step.noise == pytest.approx(diff(BEFORE, BEFORE).step.noise, abs=1)
