"""Figures that contradict each other: what no Explanation may hold, whatever trace it is of.

Tests hold every explanation and every report against this, the recorded examples' and the fuzzer's too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from sublight.diagnose.record import BREAKDOWN, BUSY, NOT_JUDGED, Explanation, Finding
from sublight.results import TOO_GOOD

NEAR = 1e-6  # of the step: rounding
NAMED, SHOWN = 0.05, 0.01  # of the step: a verdict's saving, and a finding's
IDLE = 0.1  # of the step: more of it in one part that no finding names is no healthy step
UNEVEN, MODEL_OFF = 0.25, 0.1
_PREFIX = {"n": 1e-9, "µ": 1e-6, "m": 1e-3, "": 1.0}
_TIME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s?([nµm]?)s\b(?! each)")
_NO_NUMBER = re.compile(r"\b(?:nan|inf) (?:[nµm]?s\b|%|[kMGT]?B\b)")
_NOTHING = re.compile(r"(?<![\d.])0 (calls|times|kernels|ops|copies|casts|collectives|pieces|such kernels)\b")


def contradictions(found: Explanation) -> list[str]:
    """A sentence each; none where all figures agree."""
    lines = [*_step(found), *_floors(found), *_findings(found), *_verdict(found), *_ops(found), *_words(found)]
    return [*lines, *(f"{finding.id}: {line}" for finding in found.findings for line in _finding(found, finding))]


def _step(found: Explanation) -> Iterator[str]:
    step, parts = found.step_s, found.breakdown
    if not (math.isfinite(step) and step > 0):
        yield f"a step of {step} s"
    if list(parts) != list(BREAKDOWN):
        yield "the parts of the step are not those that there are"
    if abs(sum(parts.values()) - step) > NEAR * step:
        yield f"the parts add up to {sum(parts.values())} s of {step} s"
    if worst := [name for name, seconds in parts.items() if not seconds >= 0]:
        yield f"less than nothing in {worst[0]}"
    if found.step_spread_s > UNEVEN * step and not any("differ" in caveat for caveat in found.caveats):
        yield f"a step of {step} ± {found.step_spread_s} s without a word"
    if found.unsure and not found.caveats:
        yield "a doubt without its reason"


def _floors(found: Explanation) -> Iterator[str]:
    step, slack = found.step_s, NEAR * found.step_s
    if not 0 <= found.floor_s <= found.op_floor_s + slack:
        yield f"a floor of {found.floor_s} s above the ops' own, {found.op_floor_s} s"
    if found.op_floor_s > step + slack:
        yield f"the ops' floor is {found.op_floor_s} s in a step of {step} s"
    if found.fixed_floor_s > found.floor_s + slack:
        yield "the floor rises by fixes"
    if step - found.combined_saving_s < found.fixed_floor_s - slack:
        yield f"{step - found.combined_saving_s} s are left, less than the floor of {found.fixed_floor_s} s"
    if found.fraction is not None and found.fraction + found.idle_s / step > 1 + NEAR:
        yield f"{found.fraction:.0%} of the limit in a step that is idle for {found.idle_s / step:.0%}"
    if found.fraction is not None and found.unknown_s > 0.1 * step + slack:
        yield "a fraction of the limit, though much of the step has no known cost"


def _findings(found: Explanation) -> Iterator[str]:
    savings, step = [finding.saving_s for finding in found.findings], found.step_s
    slack = NEAR * step
    if savings != sorted(savings, reverse=True):
        yield "the findings are not in order of their savings"
    if not max(savings, default=0.0) - slack <= found.combined_saving_s <= sum(savings) + slack:
        yield f"together {found.combined_saving_s} s, of {savings}"
    if len({finding.id for finding in found.findings}) < len(savings):
        yield "a finding stands twice"


def _finding(found: Explanation, finding: Finding) -> Iterator[str]:
    step = found.step_s
    if not 0 < finding.saving_s <= step * (1 + NEAR):
        yield f"saves {finding.saving_s} s of {step} s"
    if finding.saving_s < SHOWN * step * (1 - NEAR):
        yield "saves too little to be shown"
    if not finding.title or "\n" in finding.title or not finding.fix or not all(finding.evidence):
        yield "lacks its words"
    if any(place.end_s < place.start_s for place in finding.places):
        yield "shows itself in a place that ends before it begins"
    for words in (finding.title, *finding.evidence):
        if nothing := _NOTHING.search(words):
            yield f"counts nothing: {nothing[0]!r} in {words!r}"
        if _NO_NUMBER.search(words):
            yield f"holds no number: {words!r}"
        if finding.id == "rank-imbalance":
            continue  # which speaks of other ranks' steps
        if found.steps > 1 or found.traced_step_s <= found.step_s * 1.01:  # a place may be of another step
            for figure in (float(number) * _PREFIX[prefix] for number, prefix in _TIME.findall(words)):
                if (
                    "a step" in words
                    and "up to" not in words
                    and figure > max(step, found.traced_step_s) * 1.01 + 5e-10
                ):
                    yield f"has more than the step in it: {words!r}"
                    break


def _verdict(found: Explanation) -> Iterator[str]:
    step = found.step_s
    first = found.findings[0] if found.findings else None
    named = first is not None and first.saving_s > NAMED * step
    if found.verdict not in (first.id if first and named else "healthy", NOT_JUDGED):
        yield f"the verdict is {found.verdict}, the largest finding {first.id if first else 'none'}"
    idle = {name: seconds for name, seconds in found.breakdown.items() if name not in BUSY}
    if found.verdict == "healthy" and found.idle_s > (1 - IDLE) * step:
        yield f"healthy on an idle device: {max(idle, key=lambda name: idle[name])}"
    if found.verdict == "healthy" and not found.findings and max(idle.values()) > IDLE * step * (1 + NEAR):
        yield f"healthy, and nobody says why {max(idle, key=lambda name: idle[name])} is idle"
    if found.unsure and not found.sentence.startswith(("Probably", "No step to judge", "No cause was found")):
        yield "a verdict that is not sure, in a sure voice"


def _ops(found: Explanation) -> Iterator[str]:
    step = found.step_s
    device = sum(row.device_s for row in found.ops)
    if device > step * (1 + NEAR) + 1e-12:
        yield f"{device} s of device time in a step of {step} s"
    busy = sum(found.breakdown.get(name, 0.0) for name in BUSY)
    if abs(device - busy) > 1e-3 * step:
        yield f"the ops have {device} s, the busy parts of the step {busy} s"
    for row in found.ops:
        if row.calls <= 0 or row.device_s < 0 or row.cpu_s < 0:
            yield f"{row.name}: {row.calls} calls, {row.device_s} s on the device, {row.cpu_s} s on the host"
        if row.fraction is not None and row.fraction > TOO_GOOD and not any("floor" in line for line in found.caveats):
            yield f"{row.name}: {row.fraction:.2f} of the limit, and nobody says that this cannot be"
    if list(found.ops) != sorted(found.ops, key=lambda row: -row.device_s):
        yield "the ops are not in order of their time"


def _words(found: Explanation) -> Iterator[str]:
    if not found.sentence or "\n" in found.sentence:
        yield "the sentence is none"
    for words in (found.sentence, *found.caveats, *found.notes):
        if _NO_NUMBER.search(words):
            yield f"holds no number: {words!r}"
    if len(set(found.caveats) | set(found.notes)) < len(found.caveats) + len(found.notes):
        yield "something is said twice"
