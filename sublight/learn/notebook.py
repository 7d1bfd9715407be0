"""`sublight.learn.check(add)` in a notebook: the same check, shown as a small page; and the pages of an exercise."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sublight import units
from sublight.errors import BadInput
from sublight.learn.exercises import find
from sublight.learn.progress import Progress
from sublight.learn.source import source_of
from sublight.learn.target import target
from sublight.learn.texts import HINTS, text_of
from sublight.learn.verdict import NOTEBOOK, Verdict


def check(function: Callable[..., Any], *, exercise: str = "", gpu: str = "") -> Verdict:
    """Check the function that launches a kernel; it has the exercise's name unless `exercise` says otherwise."""
    from sublight.learn.grade.check import check as grade
    from sublight.learn.grade.crew import Crew

    source = source_of(function)
    chosen = find(exercise or function.__name__)
    if function.__name__ != chosen.name:
        source += f"\n\ndef {chosen.signature}:\n    return {function.__name__}({chosen.signature.partition('(')[2]}\n"
    with Crew() as crew:
        verdict = grade(chosen, source, crew=crew, gpu=target(gpu), file=NOTEBOOK)
    Progress().add(verdict, source)
    faults = tuple(replace(fault, text=quoted(fault.text, source)) for fault in verdict.faults)
    return replace(verdict, faults=faults, notes=tuple(quoted(note, source) for note in verdict.notes), drawn_by=page)


def quoted(words: str, source: str) -> str:
    """The words with the code of each line that they name: a cell's reader does not see our line numbers.

    >>> quoted("line 2 stores what line 1 made", "x = 1\\nstore(x)")
    '`store(x)` stores what `x = 1` made'
    """
    lines = source.splitlines()

    def code(found: re.Match[str]) -> str:
        number = int(found[1])
        return f"`{lines[number - 1].strip()}`" if 0 < number <= len(lines) else found[0]

    return re.sub(r"\bline (\d+)\b", code, words)


@dataclass(frozen=True, slots=True)
class Pages:
    """Markdown, which a notebook draws."""

    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text


def show(name: str, *, lang: str = "en") -> Pages:
    """An exercise's page, and the code to begin with."""
    exercise = find(name)
    code = f"```{'cpp' if exercise.kind == 'cuda' else 'python'}\n{exercise.starter()}```"
    return Pages(f"{text_of(exercise, lang).page}\n\n{code}")


def hint(name: str, *, lang: str = "en") -> Pages:
    """One hint more, of three; then all of them again."""
    exercise = find(name)
    return Pages(text_of(exercise, lang).hint(Progress().show_hint(exercise.name, HINTS)))


def solution(name: str, *, lang: str = "en", anyway: bool = False) -> Pages:
    """The solution, explained; after passing, or with `anyway`."""
    exercise = find(name)
    if not anyway and not Progress().state(exercise.name).has_passed:
        raise BadInput(f"{name} has not passed yet: hint({name!r}) helps on, anyway=True shows it")
    code = f"```{'cpp' if exercise.kind == 'cuda' else 'python'}\n{exercise.solution()}```"
    return Pages(f"{code}\n\n{text_of(exercise, lang).explanation}")


def page(verdict: Verdict) -> str:
    """The verdict as HTML; the learner's own words are shown as text, never as markup."""
    color = "#2e7d32" if verdict.has_passed else "#b26a00" if verdict.is_right else "#b3261e"
    rows = [f'<p style="color:{color};font-weight:600">{html.escape(verdict.sentence)}</p>']
    for fault in verdict.faults:
        place = f"<code>{html.escape(verdict.line(fault))}</code><br>" if fault.line else ""
        case = f' <span style="opacity:.7">({html.escape(fault.case)})</span>' if fault.case else ""
        rows.append(f"<p>{place}{html.escape(fault.text)}{case}</p>")
    if verdict.kernels:
        headings = ("kernel", "registers", "spilled", "occupancy", "sectors/ideal", "programs", "at best")
        rows.append(f"<table><tr>{''.join(f'<th>{heading}' for heading in headings)}</tr>")
        for each in verdict.kernels:
            sectors = f"{each.sectors / each.ideal_sectors:.2f}" if each.ideal_sectors else "–"
            best = "–" if verdict.is_unknown(each) else units.text(each.seconds, "s")
            spilled, occupancy = units.text(each.spill_bytes, "B"), units.percent(each.occupancy)
            cells = (each.name, each.registers, spilled, occupancy, sectors, f"{each.programs:,}", best)
            row = "".join(f'<td style="padding-right:1em">{html.escape(str(cell))}' for cell in cells)
            rows.append(f"<tr>{row}</tr>")
        least, floor = units.text(verdict.least_bytes, "B"), units.text(verdict.floor_s, "s")
        words = f"on {verdict.gpu} at {verdict.goal_case}: {least} must move, which takes {floor}"
        bound = "read off the compiled code: a bound, not a measurement"
        rows.append(f'</table><p>{html.escape(words)}</p><p style="opacity:.7">{bound}</p>')
    rows += [f'<p style="opacity:.7">{html.escape(note)}</p>' for note in verdict.notes]
    if verdict.printed.strip():
        rows.append(f"<pre>{html.escape(verdict.printed)}</pre>")
    return f'<div class="sublight-learn">{"".join(rows)}</div>'
