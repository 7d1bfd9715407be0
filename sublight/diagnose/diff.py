"""Two explanations of the same step: what got faster, what slower, beyond noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from sublight import units
from sublight.diagnose.record import BREAKDOWN, Explanation, OpRow
from sublight.results import Change

LEAST = 0.02  # relative: less is noise whatever the spread
IN_BOTH = 0.3  # of the ops' time in each, by ops that both have: below that they hardly do the same work
OF_STEP = 0.002  # an op's change below this share of the step is not shown
_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChange:
    """One op with its shape and type, in both; None where it did not run."""

    name: str
    shape: str
    dtype: str
    before_s: float | None
    after_s: float | None
    calls: tuple[float, float]
    noise: float

    @property
    def change_s(self) -> float:
        return (self.after_s or 0.0) - (self.before_s or 0.0)

    @property
    def verdict(self) -> Literal["slower", "faster", "same", "new", "gone"]:
        if self.before_s is None:
            return "new"
        if self.after_s is None:
            return "gone"
        if abs(self.change_s) <= self.noise * self.before_s:
            return "same"
        return "slower" if self.change_s > 0 else "faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """The step, its parts and its ops, before and after."""

    before: Explanation
    after: Explanation
    step: Change
    parts: dict[str, tuple[float, float]]
    ops: tuple[OpChange, ...]  # those that moved, largest change first

    @property
    def fixed(self) -> tuple[str, ...]:
        """Findings that are gone."""
        now = {finding.id for finding in self.after.findings}
        return tuple(finding.id for finding in self.before.findings if finding.id not in now)

    @property
    def new(self) -> tuple[str, ...]:
        was = {finding.id for finding in self.before.findings}
        return tuple(finding.id for finding in self.after.findings if finding.id not in was)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the two may not be what one would compare."""
        found = []
        if self.before.device != self.after.device:
            found.append(f"The devices differ: {self.before.device} before, {self.after.device} after.")
        shares = _in_both(self.before.ops, self.after.ops)
        if max(shares) < IN_BOTH:
            was, now = map(units.percent, shares)
            found.append(f"Hardly an op is in both ({was} of the time before, {now} after): is it the same work?")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        step = self.step
        return {
            "before": self.before.source,
            "after": self.after.source,
            "step_s": [step.before_s, step.after_s],
            "verdict": step.verdict,
            "noise": step.noise,
            "doubts": list(self.doubts),
            "breakdown": {name: list(pair) for name, pair in self.parts.items()},
            "fixed": list(self.fixed),
            "new": list(self.new),
            "ops": [
                {
                    "name": op.name,
                    "shape": op.shape,
                    "dtype": op.dtype,
                    "before_s": op.before_s,
                    "after_s": op.after_s,
                    "verdict": op.verdict,
                }
                for op in self.ops
            ],
        }


def diff(before: Explanation, after: Explanation) -> Diff:
    """Compare; noise is four times the two spreads in quadrature, at least 2 %."""
    noise = _noise(before, after)
    old, new = _by_key(before.ops), _by_key(after.ops)
    changes = []
    for key in dict.fromkeys((*old, *new)):
        was, now = old.get(key), new.get(key)
        name, shape, dtype = key
        change = OpChange(
            name=name,
            shape=shape,
            dtype=dtype,
            before_s=was[0] if was else None,
            after_s=now[0] if now else None,
            calls=(was[1] if was else 0.0, now[1] if now else 0.0),
            noise=noise,
        )
        if change.verdict != "same" and abs(change.change_s) > OF_STEP * before.step_s:
            changes.append(change)
    return Diff(
        before=before,
        after=after,
        step=Change(key=("step",), before_s=before.step_s, after_s=after.step_s, noise=noise),
        parts={name: (before.breakdown.get(name, 0.0), after.breakdown.get(name, 0.0)) for name in BREAKDOWN},
        ops=tuple(sorted(changes, key=lambda change: -abs(change.change_s))),
    )


def _noise(before: Explanation, after: Explanation) -> float:
    relative = [run.step_spread_s / run.step_s for run in (before, after) if run.step_s > 0]
    return max(LEAST, 4 * math.hypot(*relative)) if relative else LEAST


def _in_both(before: tuple[OpRow, ...], after: tuple[OpRow, ...]) -> tuple[float, float]:
    """Of each one's device time, what goes to ops that the other has by name; all of it where one has none."""
    names = {row.name for row in before} & {row.name for row in after}
    totals = [sum(row.device_s for row in rows) for rows in (before, after)]
    shared = [sum(row.device_s for row in rows if row.name in names) for rows in (before, after)]
    one, other = (part / total if total else 1.0 for part, total in zip(shared, totals, strict=True))
    return one, other


def _by_key(rows: tuple[OpRow, ...]) -> dict[_Key, tuple[float, float]]:
    """Device time and calls by op, shape and type, whatever module they are in."""
    found: dict[_Key, tuple[float, float]] = {}
    for row in rows:
        key = (row.name, row.shape, row.dtype)
        seconds, calls = found.get(key, (0.0, 0.0))
        found[key] = (seconds + row.device_s, calls + row.calls)
    return found
