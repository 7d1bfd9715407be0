"""`sublight explain --budget`: how long a step may take, for a CI that fails when it takes longer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.errors import BadInput, refuse_device

if TYPE_CHECKING:
    from sublight.diagnose.record import Explanation

OVER = 1  # the exit status
_TIME = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+) ?(?P<unit>s|ms|us|µs|ns)")
_FACTOR = re.compile(r"(?P<factor>\d+(?:\.\d*)?|\.\d+)x(?: +(?P<file>.+))?")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_HOW = "--budget takes a time, 50ms, or a factor and an earlier report, 1.1x BASE.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The longest step that is allowed; where that is a factor of another report's, also that report's figures."""

    step_s: float
    base: str = ""  # the other report's file
    base_step_s: float = 0.0
    breakdown: Mapping[str, float] = field(default_factory=dict)  # the base's parts of a step
    device: str = ""

    def check(self, explanation: Explanation | None) -> tuple[int, str]:
        """The exit status for this explanation, and why in one line."""
        if explanation is None:
            return OVER, "over budget: there is no report, so no step was seen to keep it"
        if self.device and self.device != explanation.device:
            return OVER, (
                f"over budget: {self.base} is of {self.device}, and this ran on {explanation.device}: "
                "times of two machines tell nothing about a change"
            )
        step, most = units.text(explanation.step_s, "s"), units.text(self.step_s, "s")
        allowed = f"the {most} allowed"
        if self.base:
            factor = f"{self.step_s / self.base_step_s:.4g}"
            allowed += f" ({factor} x {units.text(self.base_step_s, 's')} of {self.base})"
        if explanation.step_s <= self.step_s:
            return 0, f"within budget: a step takes {step} of {allowed}"
        more = units.percent(explanation.step_s / self.step_s - 1)
        return OVER, f"over budget: a step takes {step}, {more} more than {allowed}: {self._why(explanation)}"

    def _why(self, explanation: Explanation) -> str:
        """Why the step is too long: the part that grew most since the base; without a base, the verdict."""
        from sublight.diagnose.record import BREAKDOWN

        grown = {name: explanation.breakdown[name] - self.breakdown.get(name, 0.0) for name in BREAKDOWN}
        most = max(grown, key=lambda name: grown[name])
        if not self.base or grown[most] <= 0:
            return explanation.sentence
        then, now = self.breakdown.get(most, 0.0), explanation.breakdown[most]
        return (
            f'"{BREAKDOWN[most]}" grew from {units.text(then, "s")} to {units.text(now, "s")}; {explanation.sentence}'
        )

    def to_json(self, explanation: Explanation) -> dict[str, Any]:
        status, reason = self.check(explanation)
        return {"step_s": self.step_s, "base": self.base, "within": status == 0, "reason": reason}


def parse(text: str, words: Sequence[str]) -> tuple[Budget | None, list[str]]:
    """The budget, and the words that are left: a factor's report may be one of the first two.

    >>> parse("50ms", ["train.py"])
    (Budget(step_s=0.05, base='', base_step_s=0.0, breakdown={}, device=''), ['train.py'])
    """
    left = list(words)
    if not text:
        return None, left
    if match := _TIME.fullmatch(text.strip()):
        seconds = float(match["number"]) * _UNITS[match["unit"]]
        if seconds > 0:
            return Budget(step_s=seconds), left
    match = _FACTOR.fullmatch(text.strip())
    if not match or not (factor := float(match["factor"])) > 0:
        raise BadInput(f"{text!r} is no budget: {_HOW}")
    meant = left[:1] if len(left) > 1 and left[0].endswith(".json") else []  # a missing file, too
    file = match["file"] or next(iter([*filter(_is_report, left[:2]), *meant]), "")
    if not file:
        raise BadInput(f"{text!r} of what? {_HOW}, which sublight explain --json BASE.json writes")
    if not match["file"]:
        left.remove(file)
    return _of_report(factor, file), left


def _is_report(word: str) -> bool:
    """Whether a file is a report of ours, by its beginning: a trace may be of any size."""
    try:
        with open(word, "rb") as file:
            head = file.read(1 << 16)
    except OSError:
        return False
    return head.lstrip().startswith(b"{") and b'"step_s"' in head and b'"traceEvents"' not in head


def _of_report(factor: float, file: str) -> Budget:
    refuse_device(file)
    try:
        data = json.loads(Path(file).read_bytes())
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}; {_HOW}") from None
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        data = None
    step_s = data.get("step_s") if isinstance(data, dict) else None
    if not isinstance(step_s, int | float) or not math.isfinite(step_s) or step_s <= 0:
        raise BadInput(f"{file} is no report: write one by sublight explain --json {Path(file).name} …")
    parts = data.get("breakdown")
    kept = parts.items() if isinstance(parts, dict) else ()
    breakdown = {str(name): float(part) for name, part in kept if isinstance(part, int | float)}
    return Budget(
        step_s=factor * step_s,
        base=file,
        base_step_s=float(step_s),
        breakdown=breakdown,
        device=str(data.get("device") or ""),
    )
