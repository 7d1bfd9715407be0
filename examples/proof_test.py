"""The planted causes are found on recorded runs: the finding comes first, its saving is what `--fixed` really saves.

`recorded/<machine>` holds a trace of every example, the limits measured in the same session, and the fixed scripts'
times. The saving is held against the step as the capture timed it, without the profiler, less the fixed script's step.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from sublight import units
from sublight.diagnose.consistency import contradictions
from sublight.diagnose.explain import explain
from sublight.diagnose.record import Explanation
from sublight.trace.read import chrome

HERE = Path(__file__).parent
EXPECTED = tomllib.loads((HERE / "expected.toml").read_text(encoding="utf-8"))
WITHIN = 0.25
MACHINES = {"h200": "cuda", "cpu": "cpu"}
CASES = [
    (machine, name.removesuffix(".py"), row["finding"])
    for machine, device in MACHINES.items()
    for name, row in EXPECTED.items()
    if device in row["devices"]
]


def explained(machine: str, name: str, *, as_foreign: bool = False) -> Explanation:
    folder = HERE / "recorded" / machine
    trace = chrome.load(folder / f"{name}.json.gz")
    if as_foreign:  # as anybody else's profiler would have left it
        return explain([dataclasses.replace(trace, meta={})])
    return explain([trace], limits_file=str(folder / "limits.json"))


def times(machine: str) -> dict[str, dict[str, float]]:
    """By example: `fixed_s`, and `plain_s` as the captured script itself printed it."""
    rows: dict[str, dict[str, float]] = json.loads((HERE / "recorded" / machine / "times.json").read_text())
    return rows


@pytest.mark.parametrize(("machine", "name", "finding"), CASES)
def test_the_planted_cause_comes_first_with_its_saving(machine: str, name: str, finding: str) -> None:
    found = explained(machine, name)
    assert found.verdict == finding
    assert contradictions(found) == []
    assert found.floor_s > 0
    if finding != "healthy":
        real_s = found.step_s - times(machine)[name]["fixed_s"]
        assert found.findings[0].saving_s == pytest.approx(real_s, rel=WITHIN)


@pytest.mark.parametrize(("name", "finding"), [case[1:] for case in CASES if case[0] == "h200"])
def test_a_trace_without_our_own_notes_gets_the_same_verdict(name: str, finding: str) -> None:
    found = explained("h200", name, as_foreign=True)
    assert found.verdict == finding
    assert contradictions(found) == []


def row(machine: str, name: str, finding: str) -> str:
    """A line of the table in docs/explain.md."""
    found = explained(machine, name)
    step, floor = units.text(found.step_s, "s"), units.text(found.floor_s if found.floor_known else None, "s")
    if finding == "healthy":
        return f"| `{name}` | {machine} | `healthy` | {step} | {floor} | – | – |"
    fixed_s = times(machine)[name]["fixed_s"]
    predicted, real = units.text(found.findings[0].saving_s, "s"), units.text(found.step_s - fixed_s, "s")
    return f"| `{name}` | {machine} | `{finding}` | {step} | {floor} | {predicted} | {real} |"


def test_the_docs_show_what_the_recordings_give() -> None:
    page = (HERE.parent / "docs" / "explain.md").read_text(encoding="utf-8")
    missing = [line for case in CASES if (line := row(*case)) not in page]
    assert not missing, "docs/explain.md lacks:\n" + "\n".join(missing)
