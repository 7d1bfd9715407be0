"""`explain` as one HTML file: what is wrong, what to do, and the evidence to look through; nothing is fetched.

The page is whole without its script (which adds the timeline, the charts, sorting and search). Whatever a trace named
is escaped twice over: as text here, and by a policy that lets no script run but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from sublight import units
from sublight.diagnose.record import BREAKDOWN, Explanation, Finding, OpRow
from sublight.report.bench import TOO_GOOD_MEANS, dtype_text
from sublight.report.explain import op_roofline, timeline
from sublight.report.explain import terminal as explain
from sublight.results import TOO_GOOD, write_file

MOST_BYTES = 3_000_000
ASSETS = Path(__file__).parents[1] / "assets"
SCRIPTS = ("explain.js", "charts.js", "timeline.js")
OPEN_FINDINGS = 3  # the rest are there, folded
SHOWN_PLACES = 8
NOTEBOOK_HEIGHT = 760


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much of everything fits."""

    blocks: int
    ops: int
    characters: int  # of any text that came from a trace
    findings: int = 60


ROOMS = (  # the first that keeps the page under its size
    Room(blocks=timeline.MOST_BLOCKS, ops=1500, characters=timeline.MOST_CHARACTERS),
    Room(blocks=8000, ops=600, characters=160),
    Room(blocks=4000, ops=300, characters=100),
    Room(blocks=1000, ops=100, characters=60, findings=40),
    Room(blocks=200, ops=30, characters=40, findings=10),
)


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


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def script() -> str:
    """All of the page's script, as one: a policy names it by its hash."""
    return "\n" + "\n".join(asset(name) for name in SCRIPTS)


def policy() -> str:
    """Nothing is fetched, and no script runs but ours."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def json_text(data: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end one.

    >>> json_text(["</script>", "a & b"])
    '["\\\\u003c/script\\\\u003e","a \\\\u0026 b"]'
    """
    words = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":  # they stand only within strings, where an escape means the same
        words = words.replace(sign, f"\\u{ord(sign):04x}")
    return words


def _document(explanation: Explanation, chosen: timeline.Chosen | None, room: Room, tried: str) -> str:
    drawn = timeline.timeline(explanation, chosen, most_blocks=room.blocks, characters=room.characters)
    roof = op_roofline.chart(explanation, characters=room.characters)
    memory = timeline.memory(explanation)
    data = {"timeline": drawn.data if drawn else None, "roofline": roof, "memory": memory}
    title = _cut(f"{explanation.verdict}: {explanation.source}", room)
    sections = (
        _header(explanation, room),
        _step(explanation),
        f'<div class="columns">{_findings(explanation, room)}{_facts(explanation, room)}</div>',
        tried,
        _timeline(explanation, drawn),
        _ops(explanation, room),
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
    return whole.encode("utf-8", "replace").decode()  # half a surrogate pair in a name must not stop the writing


def _cut(words: str, room: Room) -> str:
    return words if len(words) <= room.characters else f"{words[: room.characters - 1]}…"


def _time(seconds: float | None) -> str:
    return escape(units.text(seconds, "s"))


def _header(explanation: Explanation, room: Room) -> str:
    fraction = units.percent(explain.fraction(explanation))
    after_s = explanation.step_s - explanation.combined_saving_s
    saving, spread = explanation.combined_saving_s, explanation.step_spread_s
    steps = "one step" if explanation.steps == 1 else f"over {explanation.steps} steps"
    after = f"step then {units.text(after_s, 's')}" if saving > 0 else "nothing to name"
    figures = (
        ("step", _time(explanation.step_s), f"± {units.text(spread, 's')}" if spread > 0 else steps),
        ("floor", _time(explanation.floor_s), f"as written {units.text(explanation.op_floor_s, 's')}"),
        ("of the limit", escape(fraction), "floor / step"),
        ("fixes save", _time(saving) if saving > 0 else "–", after),
    )
    tiles = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{value}<small>{escape(below)}</small></dd></div>'
        for name, value, below in figures
    )
    links = ("findings", "timeline", "ops", "roofline", "memory", *(["ranges"] if explanation.ranges else []), "notes")
    nav = "".join(f'<a href="#{name}">{name}</a>' for name in links)
    kind = "healthy" if explanation.verdict == "healthy" else "cause"
    return (
        '<header><div class="top"><span class="brand">sublight explain</span>'
        f'<span class="source">{escape(_cut(explanation.source, room))}</span>'
        f'<nav aria-label="Sections">{nav}</nav>'
        '<button type="button" id="theme" aria-label="Switch between light and dark">◐</button></div>'
        f'<p class="verdict {kind}">{escape(_cut(explanation.verdict, room))}</p>'
        f"<h1>{escape(explanation.sentence[: 4 * room.characters])}</h1><dl>{tiles}</dl></header>"
    )


def _parts(explanation: Explanation) -> list[tuple[str, float]]:
    return [
        (name, explanation.breakdown.get(name, 0.0)) for name in BREAKDOWN if explanation.breakdown.get(name, 0.0) > 0
    ]


def _step(explanation: Explanation) -> str:
    """The bar; each part is told on hover and focus, and again in the table beside the findings."""
    segments = []
    for name, seconds in _parts(explanation):
        share = explain.share(seconds, explanation)
        words = f"{BREAKDOWN[name]}: {units.text(seconds, 's')}, {units.percent(share)} of the step"
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
    total = f"<tr><th scope=row>step</th><td>{_time(explanation.step_s)}</td><td>{units.percent(1.0)}</td></tr>"
    facts = (
        ("device", explanation.device),
        ("limits", explanation.limits_from),
        ("steps", explain.steps_text(explanation)),
        ("trace", explanation.trace.source if explanation.trace is not None else "not kept"),
    )
    listed = "".join(f"<dt>{name}</dt><dd>{escape(_cut(words, room))}</dd>" for name, words in facts)
    return (
        '<aside aria-label="Where the step goes, in figures"><h2>Where the step goes</h2>'
        '<table class="parts"><thead class="hidden"><tr><th>part</th><th>time</th><th>share</th></tr></thead>'
        f"<tbody>{rows}</tbody><tfoot>{total}</tfoot></table><dl class=facts>{listed}</dl></aside>"
    )


def _findings(explanation: Explanation, room: Room) -> str:
    shown = explanation.findings[: room.findings]
    cards = "".join(_card(index, finding, explanation, room) for index, finding in enumerate(shown))
    more = len(explanation.findings) - len(shown)
    cards += f"<p>{more} smaller findings are left out here; --json has all.</p>" if more else ""
    return (
        f'<section id="findings" tabindex="-1"><h2>What to change</h2>{cards}'
        f'<p class="combined">{escape(explain.combined_text(explanation))}</p></section>'
    )


def _card(index: int, finding: Finding, explanation: Explanation, room: Room) -> str:
    share = explain.share(finding.saving_s, explanation) or 0.0
    long = 12 * room.characters
    evidence = "".join(f"<li>{escape(words[:long])}</li>" for words in finding.evidence[:30])
    bands = {band["p"] for band in timeline.bands(explanation) if band["f"] == index}
    places = [at for at in range(len(finding.places)) if at in bands][:SHOWN_PLACES]
    links = "".join(
        f'<a class="place" href="#timeline" data-place="{index}:{at}">'
        f"{'show in timeline' if order == 0 else order + 1}</a>"
        for order, at in enumerate(places)
    )
    concerned = ", ".join(_cut(name, room) for name in finding.ops[:6])
    foot = f'<p class="foot">{links}<span>{escape(concerned)}</span></p>' if links or concerned else ""
    return (
        f'<details class="card"{" open" if index < OPEN_FINDINGS else ""} data-finding="{index}"><summary>'
        f'<span class="number f{index % 8}">{index + 1}</span><b class="id">{escape(_cut(finding.id, room))}</b>'
        f'<span class="saves">saves <b>{_time(finding.saving_s)}</b> · {escape(units.percent(share))}</span>'
        f'<span class="title">{escape(finding.title[:long])}</span>'
        f'<span class="meter" aria-hidden="true"><i style="width:{100 * min(max(share, 0.0), 1.0):.2f}%"></i></span>'
        f'</summary><ul>{evidence}</ul><div class="fix"><button type="button" class="copy">copy</button>'
        f'<pre tabindex="0" aria-label="The fix"><code>'
        f"{escape(finding.code[:long])}</code></pre></div>{foot}</details>"
    )


def _timeline(explanation: Explanation, drawn: timeline.Timeline | None) -> str:
    head = '<section id="timeline" tabindex="-1"><h2>Timeline of one step</h2>'
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
    said = "".join(f" {escape(words)}" for words in drawn.said)
    return (
        f'{head}<div class="tools">{tools}<span id="view" role="status"></span></div>'
        '<div class="frame"><canvas id="ruler" aria-hidden="true"></canvas>'
        '<canvas id="lanes" tabindex="0" role="application" aria-label="Timeline: threads and streams over time" '
        'aria-describedby="keys"></canvas></div><div id="picked" aria-live="polite" hidden></div>'
        '<p id="keys" class="why">Wheel or pinch zooms, drag pans, a click holds an event, double-click shows '
        f"the whole step. Keys: + − ← → 0; shift with an arrow walks from event to event.{said}</p></section>"
    )


OP_COLUMNS = (  # heading and class
    ("op", ""), ("shape", ""), ("dtype", ""), ("calls", "r"), ("CPU", "r"), ("GPU", "r"), ("floor", "r"),
    ("of limit", "r"), ("bound", ""), ("where", ""), ("kernel", ""),
)  # fmt: skip


def _ops(explanation: Explanation, room: Room) -> str:
    rows = explanation.ops[: room.ops]
    names = [(explain.device_word(explanation) if name == "GPU" else name, side) for name, side in OP_COLUMNS]
    head = "".join(
        f'<th scope="col" class="{side}" aria-sort="{"descending" if at == 5 else "none"}"><button type="button">{name}'
        "</button></th>"
        for at, (name, side) in enumerate(names)
    )
    body = "".join(_op_cells(row, room) for row in rows)
    left = (
        f" The {len(explanation.ops) - len(rows)} smallest are left out; --json has all."
        if len(rows) < len(explanation.ops)
        else ""
    )
    if not rows:
        return '<section id="ops" tabindex="-1"><h2>Ops</h2><p class="why">No op was seen in these steps.</p></section>'
    return (
        '<section id="ops" tabindex="-1"><h2>Ops, per step</h2><div class="tools"><label>search '
        '<input type="search" id="search" autocomplete="off" spellcheck="false" '
        'placeholder="op, shape, module, kernel"></label>'
        f'<span id="matches" role="status">{len(rows)} {"op" if len(rows) == 1 else "ops"}.{escape(left)}</span></div>'
        '<div class="wide tall" tabindex="0" role="region" aria-label="Table of ops">'
        f'<table id="optable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>'
    )  # fmt: skip


def _op_cells(row: OpRow, room: Room) -> str:
    too_good = row.fraction is not None and row.fraction > TOO_GOOD
    kernels = "; ".join(row.kernels)
    share = min(max(row.fraction or 0.0, 0.0), 1.0)
    meter = f'<span class="of"><i style="width:{100 * share:.0f}%"></i></span>' if row.fraction is not None else ""
    cells: Iterator[tuple[str, float | None, str]] = iter(
        (
            ("n", None, escape(_cut(row.name, room))),
            ("s", None, escape(_cut(row.shape, room))),
            ("", None, escape(_cut(dtype_text(row.dtype), room))),
            ("r", row.calls, escape(explain.calls_text(row.calls))),
            ("r", row.cpu_s, _time(row.cpu_s)),
            ("r", row.device_s, _time(row.device_s)),
            ("r", -1.0 if row.floor_s is None else row.floor_s, _time(row.floor_s)),
            ("r", -1.0 if row.fraction is None else row.fraction, f"{meter}{escape(units.percent(row.fraction))}"),
            ("", None, escape(_cut(explain.bound_text(row), room))),
            ("w", None, escape(_cut(explain.where_text(row), room))),
            ("k", None, f'<span title="{escape(_cut(kernels, room))}">{escape(kernels[:60])}</span>'),
        )
    )
    made = "".join(
        f'<td class="{kind}"' + (f' data-v="{value:.9g}"' if value is not None else "") + f">{words}</td>"
        for kind, value, words in cells
    )
    return f'<tr class="bad" title="{escape(TOO_GOOD_MEANS)}">{made}</tr>' if too_good else f"<tr>{made}</tr>"


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
    said = f"Peak {peak} on {memory['where']} at {at}"
    said += f", reserved {units.text(memory['reserved_bytes'], 'B')}." if memory["reserved_bytes"] else "."
    said += " The step of the timeline is shaded."
    if memory["from_deltas"]:
        said += " Totals are summed from the first event seen: what was allocated before is not in them."
    return f'{head}<p class="why">{escape(said)}</p><div id="mem" class="chart"></div></section>'


def _ranges(explanation: Explanation, room: Room) -> str:
    if not explanation.ranges:
        return ""
    names = ("range", "calls", "CPU", explain.device_word(explanation), "streams")
    head = "".join(f'<th scope="col" class="{"" if at == 0 else "r"}">{name}</th>' for at, name in enumerate(names))
    body = "".join(
        f"<tr><td>{escape(_cut(row.name, room))}</td><td class=r>{escape(explain.calls_text(row.calls))}</td>"
        f"<td class=r>{_time(row.host_s)}</td><td class=r>{_time(row.device_s)}</td><td class=r>{row.streams}</td></tr>"
        for row in explanation.ranges[: room.ops]
    )
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    why = "Device time: from a range's first kernel to the end of its last, on each stream."
    return f'<section id="ranges" tabindex="-1"><h2>Ranges, per step</h2>{table}<p class="why">{why}</p></section>'


def _notes(explanation: Explanation, drawn: timeline.Timeline | None, room: Room) -> str:
    said = [*explanation.notes[:100], *(drawn.said if drawn else ())]
    lost = explanation.trace.lost[:100] if explanation.trace is not None else ()
    said += [words for words in lost if words not in said]
    items = "".join(f"<li>{escape(words[: 8 * room.characters])}</li>" for words in said) or "<li>Nothing to add.</li>"
    return f'<section id="notes" tabindex="-1"><h2>Notes</h2><ul>{items}</ul></section>'
