"""A Python profile as one HTML file: a flame graph to zoom, search and order, and the table; nothing is fetched.

Two profiles make a page of differences: as wide as the second, redder where it takes longer, bluer where less.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path
from typing import Any

from sublight import units
from sublight.pyprof.record import PythonProfile
from sublight.pyprof.tables import Figure, Tables, tables
from sublight.pyprof.tree import Function, ThreadTree, trees
from sublight.report.draw.assets import asset, json_text
from sublight.report.pyprof import terminal
from sublight.report.pyprof.names import where
from sublight.results import write_file

MOST_SPANS = 40_000  # spans on a page, over all threads: the shortest are left out
MOST_NODES = 40_000
MOST_ROWS = 200
MOST_LINES = 4  # lines of a function that a tooltip names
NOTEBOOK_HEIGHT = 700


def write(profile: PythonProfile, path: Path) -> None:
    write_file(document(profile), path)


def write_two(before: PythonProfile, after: PythonProfile, path: Path) -> None:
    write_file(document(after, before), path)


def document(profile: PythonProfile, before: PythonProfile | None = None) -> str:
    totals = tables(profile)
    data = {"unit": "calls" if profile.mode == "counts" else "s", **_data(profile, before)}
    script = "\n" + asset("flame.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    title = f"{before.command} → {profile.command}" if before else profile.command
    lead = _lead_of_two(before, profile) if before else terminal.headline(profile, totals)
    caveats = "".join(f"<li>{escape(line)}</li>" for line in terminal.remarks(profile, totals))
    body = (
        '<header><div class="top"><span class="brand">sublight pyprof</span>'
        f'<span class="source">{escape(title[:300])}</span>'
        '<button type="button" id="theme" aria-label="Switch between light and dark">◐</button></div>'
        f'<p class="lead">{escape(lead)}</p>{f"<ul class=notes>{caveats}</ul>" if caveats else ""}</header>'
        f'<section id="flame" aria-label="Flame graph">{_tools(before is not None)}'
        '<div class="frame"><div id="graph" tabindex="0"></div></div><div id="picked"></div></section>'
        f"<section><h2>{escape(terminal.title_of(profile))}</h2>{_table(profile, totals)}</section>"
    )
    whole = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title[:120])} · sublight pyprof</title>"
        f"<style>{asset('explain.css')}{asset('flame.css')}</style></head>"
        f'<body><main>{body}</main><div id="tip" role="tooltip" hidden></div>'
        f'<script type="application/json" id="data">{json_text(data)}</script><script>{script}</script></body></html>\n'
    )
    return whole.encode("utf-8", "replace").decode()


def repr_html(profile: PythonProfile) -> str:
    """For notebooks: the page in a frame of its own."""
    return (
        f'<iframe srcdoc="{escape(document(profile))}" sandbox="allow-scripts" title="sublight pyprof" '
        f'style="width:100%;height:{NOTEBOOK_HEIGHT}px;border:0"></iframe>'
    )


def _tools(is_diff: bool) -> str:
    orders = (("heavy", "Left heavy"),) if is_diff else (("heavy", "Left heavy"), ("time", "In time"))
    pressed = {"heavy": "true"}
    buttons = "".join(
        f'<button type="button" data-order="{name}" aria-pressed="{pressed.get(name, "false")}">{words}</button>'
        for name, words in orders
    )
    return (
        f'<div class="tools"><select id="thread" aria-label="Thread"></select>{buttons}'
        '<button type="button" id="out" disabled>Zoom out</button>'
        '<label class="hidden" for="search">Search functions</label>'
        '<input type="search" id="search" placeholder="Search functions (/)">'
        '<span id="matches" aria-live="polite"></span></div>'
    )


def _data(profile: PythonProfile, before: PythonProfile | None) -> dict[str, Any]:
    functions: dict[Function, int] = {}
    after_trees = trees(profile)
    if before is not None:
        threads = [_difference(trees(before), after_trees, functions)]
    else:
        threads = [_thread(tree, functions, after_trees) for tree in after_trees]
    names = [[function[1], where(function)] for function in functions]
    return {"functions": names, "threads": threads, "diff": before is not None}


def _thread(tree: ThreadTree, functions: dict[Function, int], every: list[ThreadTree]) -> dict[str, Any]:
    kept = _kept_nodes(tree, MOST_NODES // len(every))
    rows = []
    for at in kept:
        node = tree.nodes[at]
        number = functions.setdefault(node.function, len(functions)) if at else -1
        lines = sorted(node.lines.items(), key=lambda one: -one[1])[:MOST_LINES]
        parent = kept.get(node.parent, -1)
        rows.append(
            [parent, number, _short(node.own_s), _short(node.idle_s), node.calls, [[a, _short(b)] for a, b in lines]]
        )
    most = MOST_SPANS // len(every)
    spans = sorted((span for span in tree.spans if span.node in kept), key=lambda span: -span.duration_s)
    left_out = len(tree.spans) - min(len(spans), most)
    drawn = sorted(spans[:most], key=lambda span: span.start_s)
    shown = [[kept[span.node], _short(span.start_s), _short(span.duration_s)] for span in drawn]
    return {"name": tree.name, "nodes": rows, "spans": shown, "left_out": left_out}


def _kept_nodes(tree: ThreadTree, most: int) -> dict[int, int]:
    """The heaviest nodes by their new numbers; a node that is kept has its parents kept: they are heavier."""
    totals_s = tree.totals_s()
    order = sorted(range(len(tree.nodes)), key=lambda at: (-totals_s[at], at))[: max(most, 1)]
    wanted = {0, *order}
    kept: dict[int, int] = {}
    for at in range(len(tree.nodes)):
        if at in wanted and (at == 0 or tree.nodes[at].parent in kept):
            kept[at] = len(kept)
    return kept


def _difference(before: list[ThreadTree], after: list[ThreadTree], functions: dict[Function, int]) -> dict[str, Any]:
    """All threads as one tree; each node with its own time in both."""
    tree = ThreadTree("all threads", 0)
    own_s: list[list[float]] = [[0.0, 0.0]]
    for which, side in enumerate((before, after)):
        for one in side:
            numbers = [0]
            for node in one.nodes[1:]:
                at = tree.child(numbers[node.parent], node.function)
                numbers.append(at)
                if at == len(own_s):
                    own_s.append([0.0, 0.0])
                own_s[at][which] += node.own_s
                tree.nodes[at].calls += node.calls if which else 0
    for node, (a_s, b_s) in zip(tree.nodes, own_s, strict=True):
        node.own_s = max(a_s, b_s)  # the larger of both, so that what is gone is visible, too
    kept = _kept_nodes(tree, MOST_NODES)
    rows = []
    for at in kept:
        node = tree.nodes[at]
        number = functions.setdefault(node.function, len(functions)) if at else -1
        a_s, b_s = own_s[at]
        rows.append([kept.get(node.parent, -1), number, _short(b_s), 0, node.calls, [], _short(a_s)])
    return {"name": tree.name, "nodes": rows, "spans": [], "left_out": 0}


def _short(seconds: float) -> float:
    return round(seconds, 7)


def _lead_of_two(before: PythonProfile, after: PythonProfile) -> str:
    return (
        f"{units.text(before.wall_s, 's')} before, {units.text(after.wall_s, 's')} after; "
        "red takes longer than before, blue less"
    )


def _table(profile: PythonProfile, totals: Tables) -> str:
    names = ["share", "own", "total", "idle" if profile.mode == "sample" else "calls", "function", "where", "thread"]
    right = ("share", "own", "total", "idle", "calls")
    head = "".join(f'<th class="{"r" if name in right else ""}">{name}</th>' for name in names)
    rows = "".join(_row(profile, figure, totals) for figure in terminal.shown(totals, MOST_ROWS))
    body = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="wide tall"><table id="functions">{body}</table></div>'


def _row(profile: PythonProfile, figure: Figure, totals: Tables) -> str:
    share = units.percent(figure.own_s / totals.counted_s if totals.counted_s else 0.0)
    last = units.text(figure.own.idle_s, "s") if profile.mode == "sample" else f"{figure.calls:,}"
    cells = (share, units.text(figure.own_s, "s"), units.text(figure.total_s, "s"), last)
    figures = "".join(f'<td class="r">{escape(cell)}</td>' for cell in cells)
    words = (figure.frame.function, terminal.place(figure), terminal.thread_of(figure))
    return f"<tr>{figures}" + "".join(f'<td class="n">{escape(word)}</td>' for word in words) + "</tr>"
