"""`explain` as one HTML file: what is wrong, what to do, and the evidence to look through; nothing is fetched.

The page is whole without its script (which adds the timeline, the charts, sorting and search). Whatever a trace named
is escaped twice over: as text here, and by a policy that lets no script run but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path
from typing import Any

from sublight import units
from sublight.diagnose.record import BREAKDOWN, NOT_JUDGED, Explanation
from sublight.report.draw.assets import asset, json_text
from sublight.report.explain import cards, op_roofline, op_table, timeline
from sublight.report.explain import terminal as explain
from sublight.report.explain.causes import cause
from sublight.report.explain.room import ROOMS, Room
from sublight.results import write_file

MOST_BYTES = 3_000_000
SCRIPTS = ("explain.js", "charts.js", "timeline.js")
NOTEBOOK_HEIGHT = 760
LEAST_SHARE = 0.0005  # a part with a smaller share of the step is not drawn


def document(explanation: Explanation, tried: str = "") -> str:
    """The page; below 3 MB whatever the trace holds. `tried`: a section on what the cures really brought."""
    chosen = timeline.choose(explanation)
    for room in ROOMS:
        page = _document(explanation, chosen, room, tried)
        if len(page.encode()) < MOST_BYTES:
            break
    return page


def write(explanation: Explanation, path: Path, tried: str = "") -> None:
    write_file(document(explanation, tried), path)


def repr_html(explanation: Explanation) -> str:
    """For notebooks: the same page in a frame of its own, so that neither's style or script reaches the other."""
    return (
        f'<iframe srcdoc="{escape(document(explanation))}" sandbox="allow-scripts" title="sublight explain" '
        f'style="width:100%;height:{NOTEBOOK_HEIGHT}px;border:0"></iframe>'
    )


def script() -> str:
    """The page's whole script as one text: the policy allows it by its hash."""
    return "\n" + "\n".join(asset(name) for name in SCRIPTS)


def policy() -> str:
    """The page's content security policy: nothing is fetched, and only our script runs."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _document(explanation: Explanation, chosen: timeline.Chosen | None, room: Room, tried: str) -> str:
    drawn = timeline.timeline(explanation, chosen, most_blocks=room.blocks, characters=room.characters)
    roof = op_roofline.chart(explanation, characters=room.characters)
    memory = timeline.memory(explanation)
    data = {"timeline": drawn.data if drawn else None, "roofline": roof, "memory": memory}
    title = room.cut(f"{explanation.verdict}: {explanation.source}")
    sections = (
        _header(explanation, room),
        _step(explanation),
        f'<div class="columns">{cards.section(explanation, room)}{_facts(explanation, room)}</div>',
        tried,
        _timeline(explanation, drawn),
        op_table.section(explanation, room),
        _roofline(roof),
        _memory(memory),
        _ranges(explanation, room),
        _notes(explanation, drawn, room),
    )
    whole = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · sublight explain</title><style>{asset('explain.css')}</style></head>"
        f'<body><a class="skip" href="#findings">Skip to the findings</a><main>{"".join(sections)}</main>'
        '<div id="tip" role="tooltip" hidden></div>'
        f'<script type="application/json" id="data">{json_text(data)}</script>'
        f"<script>{script()}</script></body></html>\n"
    )
    return whole.encode("utf-8", "replace").decode()  # a name may hold half a surrogate pair, which UTF-8 refuses


def _time(seconds: float | None) -> str:
    return escape(units.text(seconds, "s"))


def _header(explanation: Explanation, room: Room) -> str:
    """The headline, what limits trust in it, and four figures."""
    ranges = ("ranges",) if explain.shown_ranges(explanation) else ()
    links = ("findings", "timeline", "ops", "roofline", "memory", *ranges, "notes")
    nav = "".join(f'<a href="#{name}">{name}</a>' for name in links)
    colour = "floor" if explanation.verdict in ("healthy", NOT_JUDGED) else cause(explanation.verdict)
    return (
        '<header><div class="top"><span class="brand">sublight explain</span>'
        f'<span class="source">{escape(room.cut(explanation.source))}</span>'
        f'<nav aria-label="Sections">{nav}</nav>'
        '<button type="button" id="theme" aria-label="Switch between light and dark">◐</button></div>'
        f'<h1><i class="c-{colour}" aria-hidden="true"></i><span>{_headline(explanation, room)}</span></h1>'
        f"{_caveats(explanation, room)}<dl>{_tiles(explanation)}</dl></header>"
    )


def _headline(explanation: Explanation, room: Room) -> str:
    """The verdict's sentence, its saving set apart."""
    words = explanation.sentence[: 4 * room.characters]
    what, colon, gain = words.rpartition(": fixing it ")
    return f"{escape(what)}: <em>fixing it {escape(gain)}</em>" if colon else escape(words)


def _caveats(explanation: Explanation, room: Room) -> str:
    if not explanation.caveats:
        return ""
    lines = "".join(f"<li>{escape(words[: 8 * room.characters])}</li>" for words in explanation.caveats[:20])
    return f'<ul class="caveats" aria-label="What limits trust in this">{lines}</ul>'


def _tiles(explanation: Explanation) -> str:
    after_s = explanation.step_s - explanation.combined_saving_s
    saving, spread = explanation.combined_saving_s, explanation.step_spread_s
    span = explanation.span
    steps = f"one {span}" if explanation.steps == 1 else f"over {explanation.steps} steps"
    left = f"{span} then {units.text(after_s, 's')}" if after_s >= explain.NOTHING * explanation.step_s else "all of it"
    after = left if saving > 0 else "nothing to name"
    unknown = units.percent(explain.share(explanation.unknown_s, explanation))
    why = f"no cost known for {unknown}" if explanation.limits.limits else "no limits known"
    known = explanation.floor_known
    written = f"as written {units.text(explanation.op_floor_s, 's')}"
    figures = (
        (span, _time(explanation.step_s), f"± {units.text(spread, 's')}" if spread > 0 else steps),
        ("floor", _time(explanation.floor_s) if known else "unknown", written if known else why),
        ("of the limit", escape(units.percent(explanation.fraction)), f"floor / {span}" if known else "not known"),
        ("all fixes save", _time(saving) if saving > 0 else "–", after),
    )
    return "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{value}<small>{escape(below)}</small></dd></div>'
        for name, value, below in figures
    )


def _parts(explanation: Explanation) -> list[tuple[str, float]]:
    """The parts of the step that are large enough to be drawn."""
    least_s = LEAST_SHARE * explanation.step_s
    return [(name, seconds) for name in BREAKDOWN if (seconds := explanation.breakdown.get(name, 0.0)) > least_s]


def _step(explanation: Explanation) -> str:
    """The bar; each part is told on hover and focus, and again in the table beside the findings."""
    segments = []
    for name, seconds in _parts(explanation):
        share = explain.share(seconds, explanation)
        words = f"{BREAKDOWN[name]}: {units.text(seconds, 's')}, {units.percent(share)} of the {explanation.span}"
        inside = units.percent(share) if (share or 0) >= 0.05 else ""
        segments.append(
            f'<span class="seg c-{name}" tabindex="0" role="listitem" data-part="{name}" data-tip="{escape(words)}" '
            f'aria-label="{escape(words)}" style="flex-grow:{1000 * (share or 0):.3f}">'
            f"<span>{escape(inside)}</span></span>"
        )
    return f'<section aria-label="Where the step goes"><div class="bar" role="list">{"".join(segments)}</div></section>'


def _facts(explanation: Explanation, room: Room) -> str:
    rows = "".join(
        f'<tr data-part="{name}"><th scope="row"><i class="c-{name}"></i>{escape(BREAKDOWN[name])}</th>'
        f"<td>{_time(seconds)}</td><td>{escape(units.percent(explain.share(seconds, explanation)))}</td></tr>"
        for name, seconds in _parts(explanation)
    )
    whole = f"<td>{_time(explanation.step_s)}</td><td>{units.percent(1.0)}</td>"
    total = f"<tr><th scope=row>{explanation.span}</th>{whole}</tr>"
    facts = (
        ("device", explanation.device),
        ("limits", explanation.limits_from),
        ("steps", explain.steps_text(explanation)),
        ("trace", explanation.trace.source if explanation.trace is not None else "not kept"),
    )
    listed = "".join(f"<dt>{name}</dt><dd>{escape(room.cut(words))}</dd>" for name, words in facts)
    return (
        f'<aside aria-label="Where the time goes, in figures"><h2>Where the {explanation.span} goes</h2>'
        '<table class="parts"><thead class="hidden"><tr><th>part</th><th>time</th><th>share</th></tr></thead>'
        f"<tbody>{rows}</tbody><tfoot>{total}</tfoot></table><dl class=facts>{listed}</dl></aside>"
    )


def _timeline(explanation: Explanation, drawn: timeline.Timeline | None) -> str:
    head = f'<section id="timeline" tabindex="-1"><h2>Timeline of one {explanation.span}</h2>'
    if drawn is None:
        why = (
            "no trace was kept with this explanation"
            if explanation.trace is None
            else "the trace has no event in this step"
        )
        return f'{head}<p class="why">Not drawn: {why}.</p></section>'
    tools = "".join(
        f'<button type="button" data-do="{name}" aria-label="{label}" title="{label}">{sign}</button>'
        for name, label, sign in (
            ("left", "Earlier", "←"), ("right", "Later", "→"), ("out", "Zoom out", "−"), ("in", "Zoom in", "+"),
            ("reset", "Show the whole step", "whole step"),
        )
    )  # fmt: skip
    notes = "".join(f" {escape(words)}" for words in drawn.notes)
    return (
        f'{head}<div class="tools">{tools}<span id="view" role="status"></span></div>'
        '<div class="frame"><canvas id="ruler" aria-hidden="true"></canvas>'
        '<canvas id="lanes" tabindex="0" role="application" aria-label="Timeline: threads and streams over time" '
        'aria-describedby="keys"></canvas></div><div id="picked" aria-live="polite" hidden></div>'
        '<p id="keys" class="why">Wheel or pinch zooms, drag pans, a click holds an event, double-click shows '
        f"the whole step. Keys: + − ← → 0; shift with an arrow walks from event to event.{notes}</p></section>"
    )


def _roofline(roof: dict[str, Any] | None) -> str:
    head = '<section id="roofline" tabindex="-1"><h2>Roofline</h2>'
    if roof is None:
        return f'{head}<p class="why">Not drawn: no op with a known cost and a known limit.</p></section>'
    return (
        f'{head}<div id="roof" class="chart"></div><p class="why">A dot is an op, as large as its time in the step; '
        "the distance to the roof above it is what a better kernel could gain. Arrow keys walk through the dots.</p>"
        "</section>"
    )


def _memory(memory: dict[str, Any] | None) -> str:
    head = '<section id="memory" tabindex="-1"><h2>Memory over time</h2>'
    if memory is None:
        why = "the trace has no allocator events (profile with profile_memory=True)"
        return f'{head}<p class="why">Not drawn: {why}.</p></section>'
    peak, at = units.text(memory["peak_bytes"], "B"), units.text(memory["peak_ns"] / 1e9, "s")
    sentence = f"Peak {peak} on {memory['where']} at {at}"
    sentence += f", reserved {units.text(memory['reserved_bytes'], 'B')}." if memory["reserved_bytes"] else "."
    sentence += " The step of the timeline is shaded."
    if memory["from_deltas"]:
        sentence += " Totals are summed from the first event seen: what was allocated before is not in them."
    return f'{head}<p class="why">{escape(sentence)}</p><div id="mem" class="chart"></div></section>'


def _ranges(explanation: Explanation, room: Room) -> str:
    rows = explain.shown_ranges(explanation)
    if not rows:
        return ""
    names = ("range", "calls", "CPU", explain.device_word(explanation), "streams")
    head = "".join(f'<th scope="col" class="{"" if at == 0 else "r"}">{name}</th>' for at, name in enumerate(names))
    body = "".join(
        f"<tr><td>{escape(room.cut(row.name))}</td><td class=r>{escape(units.count(row.calls))}</td>"
        f"<td class=r>{_time(row.host_s)}</td><td class=r>{_time(row.device_s)}</td><td class=r>{row.streams}</td></tr>"
        for row in rows[: room.ops]
    )
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    why = "Device time: from a range's first kernel to the end of its last, on each stream."
    title = f"<h2>Ranges, per {explanation.span}</h2>"
    return f'<section id="ranges" tabindex="-1">{title}{table}<p class="why">{why}</p></section>'


def _notes(explanation: Explanation, drawn: timeline.Timeline | None, room: Room) -> str:
    notes = [*explanation.notes[:100], *(drawn.notes if drawn else ())]
    lost = explanation.trace.lost[:100] if explanation.trace is not None else ()
    notes += [words for words in lost if words not in notes and words not in explanation.caveats]
    items = "".join(f"<li>{escape(words[: 8 * room.characters])}</li>" for words in notes) or "<li>Nothing to add.</li>"
    return f'<section id="notes" tabindex="-1"><h2>Notes</h2><ul>{items}</ul></section>'
