"""A cure of a finding that can be tried from outside of a script, and what that gave. Times in seconds per step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What a user would change in a file to have the cure."""

    # a new line before a statement, an argument of a call, a call of the same object in front of another, other words
    # in place of a call, a new line behind the imports
    kind: Literal["before", "argument", "chained", "instead", "import"]
    file: str
    line: int  # counted from 1; of "import" it does not matter: after the imports
    text: str
    call: str = ""  # of "argument", "chained" and "instead": the name of what is called


@dataclass(slots=True, kw_only=True)
class Changes:
    """What the cures have changed while the script runs, and what they left."""

    script: str = ""  # its file, where it is one
    did: dict[str, str] = field(default_factory=dict)  # cure: what it changed, in words
    left: dict[str, str] = field(default_factory=dict)  # cure: why it changed nothing
    edits: list[Edit] = field(default_factory=list)

    def edit(self, edit: Edit) -> None:
        if edit not in self.edits:
            self.edits.append(edit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """One change that can be made to a script that runs, without touching its file."""

    name: str
    treats: tuple[str, ...]  # ids of findings
    line: str  # what the user adds or changes
    where: str  # and where
    install: Callable[[Changes], AbstractContextManager[None]]  # active inside: the script runs there
    needs_gpu: bool = False
    tolerance: float = 0.0  # of the losses, where the cure means to change the precision; 0: as the precision has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of the script in a process of its own."""

    step_s: float | None = None
    spread_s: float = 0.0
    steps: int = 0
    steps_from: str = ""
    figures: tuple[float, ...] = ()  # the first losses, or a figure of each of the first outputs
    figures_of: str = ""  # "losses" or "outputs"
    low_precision: bool = False
    did: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    error: str = ""  # the last line of what went wrong
    refused: tuple[str, ...] = ()  # files outside of its scratch copy that it would have written

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        edits = tuple(Edit(**edit) for edit in data.pop("edits"))
        return cls(**{**data, "figures": tuple(data["figures"]), "edits": edits, "refused": tuple(data["refused"])})


Verdict = Literal["saves", "no change", "slower", "changed the numbers", "not applied", "failed", "not measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One cure, or several together, against the script as it is."""

    names: tuple[str, ...]
    findings: tuple[str, ...]
    savings_s: tuple[float, ...]  # of each finding, predicted of what the cure does
    line: str
    predicted_s: float
    fix_s: float  # predicted of what the findings' fixes do: a cure may do less
    real_s: float | None  # None: it did not run, or changed nothing
    spread_s: float
    difference: float | None  # of the losses or outputs, relative; None: there were none to compare
    verdict: Verdict
    words: str  # what it did, or why not

    @property
    def ratio(self) -> float | None:
        """Predicted by real."""
        return self.predicted_s / self.real_s if self.real_s is not None and self.verdict == "saves" else None

    @property
    def does_less(self) -> bool:
        """Whether the cure is expected to save less than the fix that its findings name."""
        return self.predicted_s < 0.98 * self.fix_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}

    def share_s(self, finding: str) -> float | None:
        """Of the real saving, what this finding has of the predicted one: a cure may treat several."""
        if self.real_s is None or finding not in self.findings:
            return None
        total_s = sum(self.savings_s)
        part = self.savings_s[self.findings.index(finding)] / total_s if total_s else 1 / len(self.findings)
        return self.real_s * part


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What `explain --fix` found."""

    before_s: float | None
    figures_of: str
    tried: tuple[Tried, ...]
    left: tuple[tuple[str, str], ...]  # findings that nothing of ours cures from outside, and what to say of each
    diff: str  # that was run, gave the same numbers, and saved time; else ""
    checked: Tried | None = None  # what running the diff gave
    lost: tuple[str, ...] = ()  # cures that saved, and whose diff did not
    notes: tuple[str, ...] = ()

    def real_saving_s(self, finding: str) -> float | None:
        """Of the best cure that was tried for this finding alone; None: none was, or none could be applied."""
        alone = [tried for tried in self.tried if len(tried.names) == 1 and tried.verdict != "changed the numbers"]
        shares = [share_s for tried in alone if (share_s := tried.share_s(finding)) is not None]
        return max(shares, default=None)

    def to_json(self) -> dict[str, Any]:
        return {
            "before_s": self.before_s,
            "compared": self.figures_of,
            "tried": [tried.to_json() for tried in self.tried],
            "left": [{"finding": finding, "reason": reason} for finding, reason in self.left],
            "diff": self.diff,
            "checked": self.checked.to_json() if self.checked else None,
            "lost": list(self.lost),
            "notes": list(self.notes),
        }
