"""Findings with one cause become one: unaligned rows, say, make loads narrow, stores narrow, and sectors too many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sublight.xray.record import Finding, Place

if TYPE_CHECKING:
    from rich.console import RenderableType

_ACCESS = ("uncoalesced", "narrow-load", "narrow-store", "misaligned")  # on one access: the first speaks
_FAMILY = {"narrow-store": "narrow-load"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One thing to mend, with everything that follows from it."""

    findings: tuple[Finding, ...]  # the first one's sentence is shown

    @property
    def lead(self) -> Finding:
        return self.findings[0]

    @property
    def ids(self) -> str:
        return ", ".join(dict.fromkeys(finding.id for finding in self.findings))

    @property
    def where(self) -> str:
        """norm.py:33, 52, 57"""
        places = sorted(
            {finding.place for finding in self.findings if finding.place}, key=lambda at: (at.file, at.line)
        )
        files: dict[str, list[str]] = {}
        for place in places:
            files.setdefault(Path(place.file).name, []).append(str(place.line))
        return "; ".join(f"{file}:{', '.join(dict.fromkeys(lines))}" for file, lines in files.items())


def causes(findings: Iterable[Finding]) -> list[Cause]:
    """The causes in the findings' order; findings about one access, or with the same sentence, are one cause."""
    held = list(findings)
    leads: dict[tuple[str, Place], str] = {}
    for finding in held:
        if finding.id in _ACCESS and finding.place:
            key = finding.kernel, finding.place
            leads[key] = min(leads.get(key, finding.id), finding.id, key=_ACCESS.index)
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in held:
        lead = leads.get((finding.kernel, finding.place), "") if finding.id in _ACCESS and finding.place else ""
        words = _FAMILY.get(lead, lead) or finding.detail
        groups.setdefault((finding.kernel, finding.is_information, "" if lead else finding.id, words), []).append(
            finding
        )
    return [Cause(findings=tuple(sorted(each, key=_rank))) for each in groups.values()]


def _rank(finding: Finding) -> int:
    return _ACCESS.index(finding.id) if finding.id in _ACCESS else 0


def cause_lines(cause: Cause, *, of: str = "", only: str = "", indent: int = 2) -> list[RenderableType]:
    """What and where, then the sentence below it."""
    from rich.text import Text

    style = "dim" if cause.lead.is_information else "bold red"
    at = f"  {cause.where}" if cause.where else ""
    head = Text.assemble((cause.ids, style), at, (f"  {of}" if of else "", "bold"))
    return [indented(head, indent), indented(Text(f"{cause.lead.detail}{only}"), indent + 2)]


def indented(words: RenderableType, columns: int = 2) -> RenderableType:
    from rich.padding import Padding

    return Padding(words, (0, 0, 0, columns), expand=False)
