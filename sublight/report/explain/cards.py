"""A card a finding: what was seen, the user's own lines as they are and as they could be, then the advice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from sublight import units
from sublight.diagnose.record import Explanation, Finding
from sublight.diagnose.source import SourceLine
from sublight.report.explain import terminal as explain
from sublight.report.explain import timeline
from sublight.report.explain.causes import cause
from sublight.report.explain.room import Room

OPEN_FINDINGS = 1  # the other cards are folded, with title and saving in view
SHOWN_PLACES = 8
_TOKENS = re.compile(
    r"(?P<c>#[^\n]*)|(?P<s>\"[^\"\n]*\"|'[^'\n]*')"
    r"|(?P<k>\b(?:and|as|assert|break|class|continue|def|del|elif|else|except|export|False|finally|for|from|if|import|in"
    r"|is|lambda|None|not|or|pass|raise|return|True|try|unset|while|with|yield)\b)"
)


def section(explanation: Explanation, room: Room) -> str:
    shown = explanation.findings[: room.findings]
    cards = "".join(_card(index, finding, explanation, room) for index, finding in enumerate(shown))
    more = len(explanation.findings) - len(shown)
    cards += f"<p>{more} smaller findings are left out here; --json has all.</p>" if more else ""
    return (
        f'<section id="findings" tabindex="-1"><h2>What to change</h2>{cards}'
        f'<p class="combined">{escape(explain.combined_text(explanation))}</p></section>'
    )


def _card(index: int, finding: Finding, explanation: Explanation, room: Room) -> str:
    """A card; the first finding's title and saving are the page's headline, and are not repeated."""
    share = explain.share(finding.saving_s, explanation) or 0.0
    long = 12 * room.characters
    evidence = "".join(f"<li>{escape(words[:long])}</li>" for words in explain.shown_evidence(finding)[:30])
    head = ""
    if not explain.is_headline(finding, explanation):
        saved = f"{escape(units.text(finding.saving_s, 's'))}</b> · {escape(units.percent(share))}"
        head = f'<span class="saves">saves <b>{saved}</span><span class="title">{escape(finding.title[:long])}</span>'
    sources = "".join(_source(line, room, explanation.span) for line in finding.sources if line.before)
    return (
        f'<details class="card"{" open" if index < OPEN_FINDINGS else ""} data-finding="{index}"><summary>'
        f'<span class="number c-{cause(finding.id)}">{index + 1}</span><b class="id">{escape(room.cut(finding.id))}</b>'
        f'{head}</summary><ul>{evidence}</ul>{sources}<div class="fix">'
        f"<h3>{'In general' if sources else 'Instead'}</h3>"
        '<button type="button" class="copy">copy</button><pre tabindex="0" aria-label="The fix"><code>'
        f"{coloured(finding.code[:long])}</code></pre></div>{_foot(index, finding, explanation, room)}</details>"
    )


def _foot(index: int, finding: Finding, explanation: Explanation, room: Room) -> str:
    bands = {band["p"] for band in timeline.bands(explanation) if band["f"] == index}
    places = [at for at in range(len(finding.places)) if at in bands][:SHOWN_PLACES]
    links = "".join(
        f'<a class="place" href="#timeline" data-place="{index}:{at}">'
        f"{'show in timeline' if order == 0 else order + 1}</a>"
        for order, at in enumerate(places)
    )
    concerned = ", ".join(room.cut(name) for name in finding.ops[:6])
    return f'<p class="foot">{links}<span>{escape(concerned)}</span></p>' if links or concerned else ""


def _source(line: SourceLine, room: Room, span: str) -> str:
    """The user's line between its neighbours; with a proposed line, both."""
    rows = [*(("", words) for words in line.above), ("was" if line.after else "here", line.before)]
    rows += [("now", line.after)] if line.after else []
    rows += [("", words) for words in line.below]
    indent = min((len(words) - len(words.lstrip()) for _, words in rows if words.strip()), default=0)
    signs = {"was": "−", "now": "+", "here": "›"}
    text = "".join(
        f'<span class="line {kind}"><i aria-hidden="true">{signs.get(kind, "")}</i>'
        f"{coloured(room.cut(words[indent:]))}\n</span>"
        for kind, words in rows
    )
    often = line.share or f"{units.count(line.count)} {'a step' if span == 'step' else 'in the run'}"
    return (
        f'<div class="mine"><p><b>{escape(room.cut(line.place))}</b> {escape(often)}</p>'
        f'<pre tabindex="0" aria-label="Your line{", as it is and as it could be" if line.after else ""}"><code>{text}'
        "</code></pre></div>"
    )


def coloured(code: str) -> str:
    """Python with its comments, strings and keywords marked.

    >>> coloured("if x: y = '<b>'  # end")
    '<span class="k">if</span> x: y = <span class="s">&#x27;&lt;b&gt;&#x27;</span>  <span class="c"># end</span>'
    """
    return "".join(_coloured(code))


def _coloured(code: str) -> Iterator[str]:
    at = 0
    for match in _TOKENS.finditer(code):
        yield escape(code[at : match.start()])
        yield f'<span class="{match.lastgroup}">{escape(match[0])}</span>'
        at = match.end()
    yield escape(code[at:])
