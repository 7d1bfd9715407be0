"""What `explain --fix` found: per cure the saving that was predicted and the real one, and the diff to make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.diagnose.record import Explanation, Finding
from sublight.fix.cure.record import Fixed, Tried
from sublight.report.draw.tables import plain, titled
from sublight.report.explain.terminal import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLE = {"saves": "green", "no change": "dim", "slower": "red", "changed the numbers": "red", "failed": "red"}


_WORDS = {"compile": "torch.compile", "loader workers": "num_workers"}  # a cure's advice has this word
_LOST = ("slower", "no change", "changed the numbers", "failed")


def as_measured(explanation: Explanation, fixed: Fixed) -> Explanation:
    """The explanation without the advice that was tried and did not help."""
    lost = {
        name: tried for tried in fixed.tried if len(tried.names) == 1 and tried.verdict in _LOST for name in tried.names
    }
    return replace(explanation, findings=tuple(_without_lost(finding, lost) for finding in explanation.findings))


def _without_lost(finding: Finding, lost: Mapping[str, Tried]) -> Finding:
    mine = {name: tried for name, tried in lost.items() if finding.id in tried.findings}
    evidence = tuple(f"{name}, tried on the script: {tried.verdict}{_by(tried)}" for name, tried in mine.items())
    words = [word for name, word in _WORDS.items() if name in mine]
    kept = [line for line in finding.fix.splitlines() if not any(word in line for word in words)]
    code = "\n".join(kept) or finding.fix
    cure = "" if any(finding.cure and finding.cure in tried.line for tried in mine.values()) else finding.cure
    return replace(finding, fix=code, cure=cure, evidence=(*finding.evidence, *evidence))


def _by(tried: Tried) -> str:
    return f" by {units.text(-tried.real_s, 's')} a step" if tried.verdict == "slower" and tried.real_s else ""


def page(before: RenderableType, fixed: Fixed) -> RenderableType:
    """Below the report of the script as it is."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [before, Text("")]
    if fixed.tried:
        step = units.text(fixed.before_s, "s")
        parts.append(titled(f"Tried on the script, run again (its step takes {step} there)", _table(fixed)))
    parts += [Text(line) for tried in fixed.tried if (line := _did(fixed, tried))]
    parts += [Text(printable(words)) for words in (*fixed.notes, *lines(fixed))]
    if fixed.diff:
        parts += [Text(""), Text(_lead(fixed), style="bold")]
    return Group(*parts)


def diff_text(fixed: Fixed) -> str:
    """The diff as it goes below the page: whole lines at any width, tabs as they are, so that a copy of it applies."""
    if any(not sign.isprintable() and sign not in "\t\r\n" for sign in fixed.diff):
        return "(it holds control characters: --write fix.patch writes it as it is)\n"
    return fixed.diff


def section(fixed: Fixed) -> str:
    """The same for the HTML page."""
    parts = [f"<p>{escape(printable(words))}</p>" for words in (*fixed.notes, *lines(fixed))]
    if fixed.tried:
        names = ("cure", *_figures(fixed), "verdict", "what it did")
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
        rows = ((name, *_cells(tried), tried.verdict, tried.words) for name, tried in _rows(fixed))
        body = "".join(f"<tr>{''.join(f'<td>{escape(printable(cell))}</td>' for cell in row)}</tr>" for row in rows)
        lead = f"<p>The script, run again, takes {escape(units.text(fixed.before_s, 's'))} a step.</p>"
        table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        parts = [lead, table, *parts]
    if fixed.diff:
        parts.append(f'<p>{escape(_lead(fixed))}</p><div class="fix"><pre>{escape(fixed.diff)}</pre></div>')
    return f'<section id="tried" tabindex="-1"><h2>Cures, tried</h2>{"".join(parts)}</section>'


def _table(fixed: Fixed) -> RenderableType:
    from rich.text import Text

    figures = _figures(fixed)[:3]
    out = plain(("cure", *figures, "verdict"), right=figures)  # reasons go below the table: beside it there is no room
    for name, tried in _rows(fixed):
        verdict = Text(tried.verdict, style=_STYLE.get(tried.verdict, ""))
        out.add_row(name, *_cells(tried)[:3], verdict)
    return out


def _did(fixed: Fixed, tried: Tried) -> str:
    """A sentence on one cure's own trial: what it saved, and how far results differ; empty where it did not run."""
    if len(tried.names) > 1 or tried.real_s is None:
        return ""
    differ = f"; {fixed.figures_of} differ by {tried.difference:.1e}" if tried.difference is not None else "; unproven"
    differ = "" if tried.verdict == "changed the numbers" and tried.difference is None else differ
    return f"{tried.names[0]}: {printable(tried.words)}{differ}"


def _figures(fixed: Fixed) -> tuple[str, ...]:
    return "predicted", "real", "ratio", f"{fixed.figures_of or 'losses'} differ"


def _rows(fixed: Fixed) -> list[tuple[str, Tried]]:
    """The table's rows: each trial under the name of its cure, then the diff's."""
    named = [(tried.names[0] if len(tried.names) == 1 else "all together", tried) for tried in fixed.tried]
    return [*named, ("the diff", fixed.checked)] if fixed.checked else named


def _cells(tried: Tried) -> tuple[str, ...]:
    """A trial's figures as cells of the table."""
    return (
        units.text(tried.predicted_s, "s"),
        "–" if tried.real_s is None else _signed(tried),
        "–" if tried.ratio is None else f"{tried.ratio:.2f}",
        "–" if tried.difference is None else f"{tried.difference:.1e}",
    )


def lines(fixed: Fixed) -> list[str]:
    """Lines below the table: why a cure did not run, what is left, and where advice goes that the diff lacks."""
    sentences = [
        f"{tried.names[0]} does less than the fix of {' and '.join(tried.findings)}: "
        f"{units.text(tried.predicted_s, 's')} is predicted of it, {units.text(tried.fix_s, 's')} of the fix"
        for tried in fixed.tried
        if len(tried.names) == 1 and tried.does_less
    ]
    sentences += [
        f"{tried.names[0]}: {tried.verdict}: {tried.words}"
        for tried in fixed.tried
        if tried.verdict in ("not applied", "not measured", "failed")
    ]
    if not fixed.diff:
        kept = [tried for tried in fixed.tried if tried.verdict == "saves" and not set(tried.names) & set(fixed.lost)]
        sentences += [
            f"add: {line}" for line in dict.fromkeys(line for tried in kept for line in tried.line.splitlines())
        ]
    return sentences + [f"{finding}: {reason}" for finding, reason in fixed.left]


def to_json(explanation: dict[str, Any], fixed: Fixed) -> dict[str, Any]:
    """The explanation's JSON, with what each finding's cure really saved."""
    findings = [{**each, "real_saving_s": fixed.real_saving_s(each["id"])} for each in explanation["findings"]]
    return {**explanation, "findings": findings, "fix": fixed.to_json()}


def _signed(tried: Tried) -> str:
    real_s = tried.real_s or 0.0
    return f"{'−' if real_s < 0 else ''}{units.text(abs(real_s), 's')} ± {units.text(tried.spread_s, 's')}"


def _lead(fixed: Fixed) -> str:
    """The sentence above the diff."""
    assert fixed.checked is not None
    saved = units.text(fixed.checked.real_s, "s")
    return (
        f"The diff was run in a scratch copy: it saves {saved} a step, with the same {fixed.figures_of}. "
        "No file was changed; git apply takes it:"
    )
