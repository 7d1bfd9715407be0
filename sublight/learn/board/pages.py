"""The board's pages. No scripts: everything that a person wrote is shown as text, and nothing else could run."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sublight import units
from sublight.learn.board.store import Account, Entry
from sublight.learn.exercises import CHAPTERS, EXERCISES
from sublight.learn.record import Exercise
from sublight.learn.texts import text_of

BIN = 0.02  # of the distribution
STATES = {
    "queued": "waits",
    "running": "is being run",
    "verified": "run here, passed",
    "rejected": "run here, not passed",
    "not_rerun": "not run here",
}
STYLE = """
:root { color-scheme: light dark; --line: #8884; --accent: #2e7d32; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
a { color: inherit; } h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; } .soft { opacity: .7; } .mark { color: var(--accent); font-weight: 600; }
td { overflow-wrap: break-word; max-width: 16rem; }
pre { background: var(--soft); padding: 1rem; overflow-x: auto; font-size: .85rem; }
nav { display: flex; gap: 1.5rem; align-items: baseline; border-bottom: 1px solid var(--line); padding-bottom: .5rem; }
nav form { margin-left: auto; } button, input { font: inherit; } svg { width: 100%; height: 9rem; }
rect { fill: var(--accent); } text { fill: currentColor; font-size: 11px; } .scroll { overflow-x: auto; }
"""


def text(words: object) -> str:
    return html.escape(str(words), quote=True)


def page(title: str, body: Iterable[str], viewer: Account | None) -> str:
    who = (
        f'<form method="post" action="/logout">{text(viewer.name)} <button>leave</button></form>'
        if viewer
        else '<form action="/login"><button>sign in</button></form>'
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{text(title)}</title><link rel="stylesheet" href="/style.css"></head><body>'
        f'<nav><a href="/">sublight board</a>{who}</nav><h1>{text(title)}</h1>{"".join(body)}</body></html>'
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML already."""

    def line(tag: str, cells: Sequence[str]) -> str:
        marks = [f'<{tag} class="n">' if place in numbers else f"<{tag}>" for place in range(len(cells))]
        return "<tr>" + "".join(f"{mark}{cell}</{tag}>" for mark, cell in zip(marks, cells, strict=True)) + "</tr>"

    lines = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>{line("th", [text(each) for each in headings])}{lines}</table></div>'


def index(counts: Mapping[str, Mapping[str, int]], status: Mapping[str, Any], viewer: Account | None) -> str:
    body = [f'<p class="soft">{text(status["sentence"])}</p>']
    for chapter, title in CHAPTERS.items():
        rows = []
        for exercise in (each for each in EXERCISES if each.chapter == chapter and each.name in counts):
            of = counts[exercise.name]
            link = f'<a href="/exercise/{text(exercise.name)}">{text(exercise.name)}</a>'
            rows.append((link, text(text_of(exercise, "en").title), str(of.get("verified", 0)), str(sum(of.values()))))
        if rows:
            body += [f"<h2>{text(title)}</h2>", table(("exercise", "", "passed", "entries"), rows, numbers=(2, 3))]
    return page("Leaderboard", body, viewer)


def exercise_page(
    exercise: Exercise,
    gpu: str,
    gpus: Sequence[str],
    ranking: Sequence[Entry],
    unranked: Sequence[Entry],
    *,
    viewer: Account | None,
    sees_code: bool,
) -> str:
    """Ranking, distribution, and what the server could not run."""
    goal = exercise.goal
    assert goal is not None, f"{exercise.name} has no ranking"
    at = f"{', '.join(f'{name} = {size}' for name, size in goal.shape.items())}, {goal.dtype}"
    links = " · ".join(
        f"<b>{text(each)}</b>" if each == gpu else f'<a href="?gpu={text(each)}">{text(each)}</a>' for each in gpus
    )
    body = [
        f"<p>{text(text_of(exercise, 'en').title)}. The goal is {units.percent(goal.fraction)} of the limit at "
        f"{text(at)}. "
        "What its code allows is a bound that the server reads off the compiled code. Where the server has this GPU, "
        "it times entries there by its own clock, and ranks by that; others come after them. What a sender's grader "
        "measured stands beside it: this server has not run that.</p>",
        f"<p>{links or text(gpu)}</p>",
        "<h2>Ranking</h2>",
    ]
    firsts: dict[str, Entry] = {}
    for entry in sorted(ranking, key=lambda each: each.id):
        firsts.setdefault(entry.code_hash, entry)
    rows = [
        (
            str(place),
            text(entry.account) + (" <span class='mark'>you</span>" if viewer and entry.account == viewer.name else ""),
            _timed(entry.timed),
            units.percent(entry.fraction),
            _timed(entry.claim.get("timed")),
            text(machine(entry)),
            _when(entry),
            _entry_link(entry) + _same(entry, firsts[entry.code_hash]),
        )
        for place, entry in enumerate(ranking, 1)
    ]
    headings = ("", "who", "timed here", "its code allows", "measured by its sender", "sent from", "when", "entry")
    body.append(table(headings, rows, numbers=(0, 2, 3, 4)) if rows else "<p>Nobody has passed yet.</p>")
    if ranking:
        body += ["<h2>Distribution</h2>", distribution([entry.fraction or 0.0 for entry in ranking], goal.fraction)]
    if unranked:
        unproven = [
            (text(each.account), _claimed(each), text(machine(each)), _when(each), _entry_link(each))
            for each in unranked
        ]
        body += [
            "<h2>Not run by this server</h2>",
            '<p class="soft">What their senders say of them; they are not ranked.</p>',
            table(("who", "says", "sent from", "when", "entry"), unproven, numbers=(1,)),
        ]
    if not sees_code:
        body.append('<p class="soft">The code of others is shown to those who have passed here themselves.</p>')
    return page(exercise.name, body, viewer)


def distribution(fractions: Sequence[float], goal: float) -> str:
    """How many reached how much, from the goal on."""
    first = int(min([goal, *fractions]) / BIN)
    last = max(int(max(fractions) / BIN), int(1 / BIN))
    bins = [sum(int(each / BIN) == place for each in fractions) for place in range(first, last + 1)]
    width, most = 600 / len(bins), max(bins)
    bars = []
    for place, count in enumerate(bins):
        x, height = place * width, 80 * count / most
        label = f'<text x="{x + 2:.1f}" y="{96 - height:.1f}">{count}</text>' if count else ""
        bars.append(f'<rect x="{x:.1f}" y="{100 - height:.1f}" width="{width - 2:.1f}" height="{height:.1f}"/>{label}')
        if place % 2 == 0:
            bars.append(f'<text x="{x:.1f}" y="114">{(first + place) * BIN:.2f}</text>')
    words = f"{len(fractions)} people; fractions of the limit"
    return f'<svg viewBox="0 0 600 120" role="img" aria-label="{text(words)}">{"".join(bars)}</svg>'


def entry_page(entry: Entry, *, viewer: Account | None, sees_code: bool, sees_verdict: bool) -> str:
    claim = entry.claim
    facts = [
        ("exercise", f'<a href="/exercise/{text(entry.exercise)}?gpu={text(entry.gpu)}">{text(entry.exercise)}</a>'),
        ("who", text(entry.account)),
        ("state", text(STATES[entry.state])),
        ("its code allows", units.percent(entry.fraction) if entry.fraction else f"{_claimed(entry)} by its sender"),
        ("timed here", _timed(entry.timed) if entry.timed else f"no: {text(entry.verdict.get('not_timed') or '–')}"),
        ("measured by its sender", _timed(entry.claim.get("timed"))),
        ("compiled for", text(entry.gpu)),
        ("sent from", text(machine(entry))),
        (
            "versions",
            text(", ".join(f"{name} {value}" for name, value in (claim.get("versions") or {}).items()) or "–"),
        ),
        ("when", _when(entry)),
        ("code", f"<code>sha256 {text(entry.code_hash[:16])}</code>"),
    ]
    body = ["<table>", *(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts), "</table>"]
    if entry.reason and (sees_verdict or entry.state == "not_rerun"):
        body.append(f"<h2>Why</h2><p>{text(entry.reason)}</p>")
    kernels = entry.verdict.get("kernels") if sees_verdict or sees_code else None
    if kernels:
        rows = [
            (text(each["name"]), text(each["registers"]), units.percent(each["occupancy"]), text(each["sentence"]))
            for each in kernels
        ]
        body += ["<h2>Kernels</h2>", table(("kernel", "registers", "occupancy", ""), rows, numbers=(1, 2))]
    if sees_code:
        body += ["<h2>Code</h2>", f"<pre><code>{text(entry.source)}</code></pre>"]
    else:
        body.append('<p class="soft">Its code is shown to those who have passed this exercise here themselves.</p>')
    return page(f"Entry {entry.id}", body, viewer)


def login(problem: str = "") -> str:
    body = [
        f"<p>{text(problem)}</p>" if problem else "",
        '<form method="post" action="/login"><label>Your token <input name="token" type="password" '
        'autocomplete="current-password" required maxlength="100"></label> <button>sign in</button></form>',
    ]
    return page("Sign in", body, None)


def problem(words: str, viewer: Account | None = None) -> str:
    return page("Not so", [f"<p>{text(words)}</p>"], viewer)


def machine(entry: Entry) -> str:
    return str(entry.claim.get("machine") or "–")


def _claimed(entry: Entry) -> str:
    fraction = entry.claim.get("fraction")
    return units.percent(fraction) if isinstance(fraction, float) else "–"


def _timed(timed: Mapping[str, Any] | None) -> str:
    """A time on a GPU, and the fraction of its limit that this is."""
    return f"{units.percent(timed['fraction'])}, {units.text(timed['seconds'], 's')}" if timed else "–"


def _when(entry: Entry) -> str:
    return text(entry.at[:16].replace("T", " "))


def _entry_link(entry: Entry) -> str:
    return f'<a href="/entry/{entry.id}">{entry.id}</a>'


def _same(entry: Entry, first: Entry) -> str:
    return "" if entry is first else f' <span class="soft">the same code as {text(first.account)}, later</span>'
