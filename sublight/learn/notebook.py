"""`sublight.learn.check(add)` in a notebook: the same check, shown as a small page."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sublight import units
from sublight.learn.exercises import find
from sublight.learn.progress import Progress
from sublight.learn.source import source_of
from sublight.learn.target import target
from sublight.learn.verdict import Verdict


def check(function: Callable[..., Any], *, exercise: str = "", gpu: str = "") -> Verdict:
    """Check the function that launches a kernel; it has the exercise's name unless `exercise` says otherwise."""
    from sublight.learn.grade.check import check as grade
    from sublight.learn.grade.crew import Crew

    chosen = find(exercise or function.__name__)
    source = source_of(function)
    if function.__name__ != chosen.name:
        source += f"\n\ndef {chosen.signature}:\n    return {function.__name__}({chosen.signature.partition('(')[2]}\n"
    with Crew() as crew:
        verdict = grade(chosen, source, crew=crew, gpu=target(gpu), file="the notebook")
    Progress().add(verdict, source)
    return replace(verdict, drawn_by=page)


def page(verdict: Verdict) -> str:
    """As HTML; what the learner wrote is shown as text."""
    color = "#2e7d32" if verdict.has_passed else "#b26a00" if verdict.is_right else "#b3261e"
    rows = [f'<p style="color:{color};font-weight:600">{html.escape(verdict.sentence)}</p>']
    for fault in verdict.faults:
        place = f"<code>{html.escape(verdict.line(fault))}</code><br>" if fault.line else ""
        case = f' <span style="opacity:.7">({html.escape(fault.case)})</span>' if fault.case else ""
        rows.append(f"<p>{place}{html.escape(fault.text)}{case}</p>")
    if verdict.kernels:
        rows.append("<table><tr><th>kernel<th>registers<th>occupancy<th>sectors/ideal<th>programs<th>at best</tr>")
        for each in verdict.kernels:
            sectors = f"{each.sectors / each.ideal_sectors:.2f}" if each.ideal_sectors else "–"
            cells = (each.name, each.registers, units.percent(each.occupancy), sectors, each.programs)
            rows.append(
                "<tr>"
                + "".join(
                    f'<td style="padding-right:1em">{html.escape(str(cell))}'
                    for cell in (*cells, units.text(each.seconds, "s"))
                )
            )
        rows.append('</table><p style="opacity:.7">read off the compiled code: a bound, not a measurement</p>')
    if verdict.printed.strip():
        rows.append(f"<pre>{html.escape(verdict.printed)}</pre>")
    return f'<div class="sublight-learn">{"".join(rows)}</div>'
