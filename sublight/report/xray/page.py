"""`xray` as one HTML file: kernels side by side, then source ↔ TTGIR ↔ PTX ↔ SASS linked by line; nothing is fetched.

The page is whole without its script, which links the panes. A kernel's source is text to escape like any other, and
a policy lets no script run but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path, PurePath
from typing import Any

from sublight import units
from sublight.errors import BadInput
from sublight.report.draw.assets import asset, json_text
from sublight.report.xray import code as xray_code
from sublight.report.xray import summary as xray_summary
from sublight.report.xray import tables as xray_tables
from sublight.report.xray.code import PaneName, Panes
from sublight.report.xray.facts import bytes_text, counted, same_kernels, specialised
from sublight.report.xray.tables import line_link, terms
from sublight.report.xray.view import KernelView
from sublight.results import write_file
from sublight.xray.record import Place

SCRIPTS = ("explain.js", "xray.js")
STYLES = ("explain.css", "xray.css")
PANES: dict[PaneName, str] = {"source": "Source", "ttgir": "TTGIR", "ptx": "PTX", "sass": "SASS"}
UNKNOWN = "–"
FACTS = ("registers", "spills", "shared memory", "threads", "blocks per SM", "occupancy", "tensor cores")
KEYS = (
    "Point at a line to see what comes from it · click: hold it · j k: next line · n p: next linked rows · "
    "1–4: panes · /: search · Esc: let go"
)


def document(views: Sequence[KernelView]) -> str:
    """The page."""
    if not views:
        raise BadInput("there is no kernel to show: name a file that has one")
    drawn = [xray_code.panes(view.code, view.source) for view in views]
    data = {"kernels": [_data(panes) for panes in drawn]}
    title = _title(views)
    articles = "".join(
        _article(view, panes, index) for index, (view, panes) in enumerate(zip(views, drawn, strict=True))
    )
    script = "\n" + "\n".join(asset(name) for name in SCRIPTS)
    whole = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · sublight xray</title>"
        f"<style>{''.join(asset(name) for name in STYLES)}</style></head>"
        f'<body class="xray"><a class="skip" href="#panes-0">Skip to the code</a><main>{_header(views, title)}'
        f'{_kernels(views)}{articles}</main><div id="tip" role="tooltip" hidden></div>'
        f'<script type="application/json" id="data">{json_text(data)}</script>'
        f"<script>{script}</script></body></html>\n"
    )
    return whole.encode("utf-8", "replace").decode()


def write(views: Sequence[KernelView], path: Path) -> None:
    write_file(document(views), path)


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _data(panes: Panes) -> dict[str, Any]:
    """What the script needs to link rows."""
    return {
        "file": PurePath(panes.file).name,
        "keys": [{"lines": key.lines, "through": key.through} for key in panes.keys],
    }


def _title(views: Sequence[KernelView]) -> str:
    names = list(dict.fromkeys(view.code.name for view in views))
    gpus = list(dict.fromkeys(view.code.gpu.name for view in views))
    what = names[0] if len(names) == 1 else f"{len(names)} kernels"
    return f"{what} on {', '.join(gpus) if len(gpus) <= 3 else f'{len(gpus)} GPUs'}"


def _header(views: Sequence[KernelView], title: str) -> str:
    files = list(dict.fromkeys(PurePath(view.code.file).name for view in views if view.code.file))
    return (
        '<header><div class="top"><span class="brand">sublight xray</span>'
        f'<span class="source">{escape(", ".join(files[:4]))}</span><nav aria-label="Sections"></nav>'
        '<button type="button" id="theme" aria-label="Switch between light and dark">◐</button></div>'
        f"<h1>{escape(title)}</h1></header>"
    )


def facts(view: KernelView) -> dict[str, tuple[str, str]]:
    """Name -> figure, and a remark on it."""
    used, gpu = view.code.resources, view.code.gpu
    room = f"of {gpu.shared_bytes_per_sm // 1024} KiB an SM" if gpu.shared_bytes_per_sm else ""
    warps = f"{counted(-(-used.threads // 32), 'warp')} a block" if used.threads else "the launch says"
    limit = f"limited by {view.limited_by}" if view.limited_by else ""
    tensor = {None: UNKNOWN, "": "none"}.get(view.tensor_core, view.tensor_core)
    figures = {
        "registers": (str(used.registers), "a thread"),
        "spills": (f"{used.spill_bytes} B" if used.spill_bytes else "none", _stack(view)),
        "shared memory": (bytes_text(used.shared_bytes), room),
        "threads": (str(used.threads) if used.threads else UNKNOWN, warps),
        "blocks per SM": (str(view.blocks_per_sm) if view.blocks_per_sm is not None else UNKNOWN, limit),
        "occupancy": (units.percent(view.occupancy), "of an SM's warps"),
        "tensor cores": (str(tensor), ""),
    }
    return {name: figures[name] for name in FACTS}


def _stack(view: KernelView) -> str:
    used = view.code.resources
    return f"stack {used.stack_bytes} B" if used.stack_bytes else ""


def _kind(name: str, view: KernelView) -> str:
    """The CSS class that marks a figure to worry about."""
    return "poor" if name == "spills" and view.code.resources.spill_bytes else ""


def _kernels(views: Sequence[KernelView]) -> str:
    """Of several a table, then a sheet for each kernel: a column for each GPU. The script shows one sheet at a time."""
    groups = same_kernels([view.code for view in views])
    cards = []
    for members in groups:
        first = views[members[0]]
        body = _tiles(first, members[0]) if len(members) == 1 else _compared(views, members)
        parts = [_signature(first), "" if _differ(views, members) else specialised(first.code)]
        under = " · ".join(filter(None, parts))
        heading = f"<h2>{escape(first.code.name)}</h2>" if len(groups) > 1 else ""
        heading += f'<p class="signature">{escape(under)}</p>' if under else ""
        cards.append(f'<div class="sheet">{heading}{body}{_findings(views, members)}</div>')
    summary = _summary(views) if len(groups) > 1 else ""
    words = terms("register", "spill", "shared memory", "warp", "occupancy")
    sheets = f'<div class="sheets">{"".join(cards)}</div>'
    return f'<section id="kernels" aria-label="Kernels">{summary}{sheets}{words}</section>'


def _summary(views: Sequence[KernelView]) -> str:
    """The table of kernels and GPUs; a click on a row shows its sheet below."""
    entries = xray_summary.rows(views)
    names = xray_summary.shown(entries)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("kernel", *names))
    rows, before = [], ""
    for row in entries:
        cells = "".join(
            f'<td class="{"poor" if name in row.bad else ""}">{escape(row.cells[name])}</td>' for name in names
        )
        again = " again" if row.label == before else ""
        pick = f'<button type="button" class="pick{again}" data-pick="{row.at}">{escape(row.label)}</button>'
        rows.append(f'<tr data-k="{row.at}" data-pick="{row.at}"><td>{pick}</td>{cells}</tr>')
        before = row.label
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="wide tall summary">{table}</div>'


def _differ(views: Sequence[KernelView], members: Sequence[int]) -> bool:
    """Whether constants or the launch differ from GPU to GPU."""
    return len({specialised(views[at].code) for at in members}) > 1


def _signature(view: KernelView) -> str:
    code = view.code
    return ", ".join(f"{name}: {kind}" for name, kind in code.signature.items() if kind != "constexpr")


def _tiles(view: KernelView, index: int) -> str:
    tiles = "".join(
        f'<div class="tile {_kind(name, view)}"><dt>{name}</dt>'
        f"<dd>{escape(value)}<small>{escape(below)}</small></dd></div>"
        for name, (value, below) in facts(view).items()
        if value != UNKNOWN
    )
    return (
        f'<dl class="tiles" data-k="{index}"><div class="tile gpu"><dt>GPU</dt><dd>{_gpu(view)}</dd></div>{tiles}</dl>'
    )


def _gpu(view: KernelView) -> str:
    return f"{escape(view.code.gpu.name)}<small>sm_{view.code.capability}</small>"


def _compared(views: Sequence[KernelView], members: Sequence[int]) -> str:
    """The GPUs' figures side by side; those that differ stand out."""
    each_facts = [facts(views[at]) for at in members]
    head = "".join(
        f'<th scope="col" data-k="{at}">'
        f'<button type="button" class="pick" data-pick="{at}">{_gpu(views[at])}</button></th>'
        for at in members
    )
    rows = []
    for name in FACTS:
        figures = {fact[name][0] for fact in each_facts}
        if figures == {UNKNOWN}:
            continue
        differs = len(figures) > 1
        cells = "".join(
            f'<td data-k="{at}" class="{_kind(name, views[at])}"><b>{escape(fact[name][0])}</b>'
            f"<small>{escape(fact[name][1])}</small></td>"
            for at, fact in zip(members, each_facts, strict=True)
        )
        rows.append(f'<tr class="{"differs" if differs else ""}"><th scope="row">{name}</th>{cells}</tr>')
    if _differ(views, members):
        cells = "".join(f'<td data-k="{at}" class="given">{escape(specialised(views[at].code))}</td>' for at in members)
        rows.append(f'<tr class="differs"><th scope="row">constants</th>{cells}</tr>')
    return (
        f'<div class="wide compare"><table><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _findings(views: Sequence[KernelView], members: Sequence[int]) -> str:
    """The findings; one that several GPUs share is listed once."""
    gpus_of: dict[tuple[bool, str, Place | None, str], list[int]] = {}
    for at in members:
        for one in views[at].findings:
            gpus_of.setdefault((one.is_information, one.id, one.place, one.detail), []).append(at)
    items = []
    for (is_information, name, place, detail), where in sorted(gpus_of.items(), key=lambda item: item[0][0]):
        gpus = ", ".join(views[at].code.gpu.name for at in where) if len(where) < len(members) else ""
        items.append(
            f'<li class="{"told" if is_information else "wrong"}"><span class="id">{escape(name)}</span>'
            f'<span class="where">{line_link(place, where[0]) if place else ""}</span>'
            f"<span>{escape(detail)}{f' <em>({escape(gpus)})</em>' if gpus else ''}</span></li>"
        )
    return f'<ul class="findings">{"".join(items)}</ul>' if items else ""


def _article(view: KernelView, panes: Panes, index: int) -> str:
    """The panes of one kernel and what stands below them; all but the first wait in templates."""
    heat = view.heat or panes.weights()
    badges = xray_code.badges(panes.file, view.accesses, view.findings)
    shown: list[PaneName] = [name for name in PANES if name == "source" or name in panes.listings]
    drawn = []
    for name in shown:
        rows = xray_code.html(panes, name, heat=heat, badges=badges)
        count = len(panes.listings.get(name, ())) or (panes.source or "").count("\n")
        rows = f'<div class="rows">{rows}</div>'
        inside = rows if index == 0 else f"<template>{rows}</template>"
        file = f'<span class="file" title="{escape(panes.file)}">{escape(PurePath(panes.file).name)}</span>'
        drawn.append(
            f'<div class="pane p-{name}" data-pane="{name}"><div class="head"><b>{PANES[name]}</b>'
            f'{file if name == "source" else f"<span>{count:,} lines</span>"}<span class="lit-count"></span>'
            '<button type="button" data-step="-1" aria-label="Linked rows above" disabled>↑</button>'
            '<button type="button" data-step="1" aria-label="Linked rows below" disabled>↓</button></div>'
            f'<div class="body" tabindex="0" role="region" aria-label="{PANES[name]}">{inside}</div>'
            '<div class="map" aria-hidden="true"></div></div>'
        )
    toggles = "".join(
        f'<button type="button" data-toggle="{name}" aria-pressed="true">{PANES[name]}</button>' for name in shown
    )
    kinds = "".join(
        f'<li><i class="k-{kind}"></i>{kind}</li>'
        for kind in ("global", "shared", "local", "tensor", "barrier", "shuffle", "special")
    )
    notes = "".join(f"<li>{escape(words)}</li>" for words in view.notes)
    return (
        f'<article class="kernel" id="kernel-{index}" data-k="{index}" aria-label="{escape(view.code.name)}">'
        + (f'<section class="notes"><ul>{notes}</ul></section>' if notes else "")
        + f'<section id="panes-{index}" tabindex="-1">'
        f"<h2>Code <small>{escape(view.code.name)} on {escape(view.code.gpu.name)}</small></h2>"
        f'<div class="tools">{toggles}<input type="search" placeholder="search the panes" aria-label="Search">'
        f'<span class="matches"></span><span class="now" aria-live="polite"></span>'
        f'<ul class="legend">{kinds}</ul></div><div class="panes">{"".join(drawn)}</div>'
        f'<p class="keys">{KEYS}</p></section>'
        f'<div class="parts-below">{xray_tables.sections(view, index)}</div></article>'
    )
