"""One self-contained HTML file: no script, nothing fetched, light and dark by the reader's own theme."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from sublight import units
from sublight.cost import shape_text
from sublight.report import bench as bench_report
from sublight.report import limits as limits_report
from sublight.results import Limits, Run, write_file

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--faint:#59636e;--line:#e4e8ec}
:root{--good:#1a7f37;--bad:#b35900;--error:#c1121f}
@media(prefers-color-scheme:dark){
:root{--paper:#0d1117;--ink:#e6edf3;--faint:#9198a1;--line:#232a33;--good:#4ac26b;--bad:#f0b24f;--error:#ff7b72}}
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
body{max-width:1080px;margin:32px auto;padding:0 20px}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px}p{color:var(--faint);margin:4px 0 20px}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:4px 18px 4px 0;text-align:left}th{color:var(--faint);font-weight:500;border-bottom:1px solid var(--line)}
td.r,th.r{text-align:right}tr.top td{border-top:1px solid var(--line)}pre{font:13px/1.3 ui-monospace,monospace}
.normal{color:var(--good)}.low{color:var(--bad)}.note,.none{color:var(--faint)}
.error,.error td{color:var(--error);font-weight:600}.best{font-weight:700}svg{max-width:100%;height:auto}
.wide svg{min-width:640px}
"""
Row = tuple[str, Sequence[tuple[str, str]]]  # the row's class, then each cell's class and text


def document(title: str, lead: str, *body: str, language: str = "en") -> str:
    head = f'<!doctype html><html lang="{language}"><head><meta charset="utf-8">'
    head += '<meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
    return f"{head}<body><h1>{escape(title)}</h1><p>{escape(lead)}</p>{''.join(body)}</body></html>\n"


def table(headings: Sequence[tuple[str, str]], rows: Iterable[Row]) -> str:
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for kind, name in headings)
    body = "".join(
        f'<tr class="{kind}">' + "".join(f'<td class="{cell}">{escape(text)}</td>' for cell, text in cells) + "</tr>"
        for kind, cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def limits(measured: Limits) -> str:
    """The limits table and the memory curves."""
    sides = ("", "r", "r", "r", "", "note")
    rows: list[Row] = []
    for group in limits_report.groups(measured):
        for index, line in enumerate(group):
            kinds = (*sides[:4], line.judgement if line.judgement != "–" else "note", "note")
            rows.append(("top" if index == 0 and rows else "", list(zip(kinds, line.cells, strict=True))))
    curves = []
    for limit in measured.limits:
        if limit.detail.get("curve"):
            lines = "\n".join(limits_report.curve_lines(limit))
            curves.append(f"<h2>{escape(limit.name)} by blocks</h2><pre>{escape(lines)}</pre>")
    rows_as_table = table(list(zip(sides, limits_report.HEADINGS, strict=True)), rows)
    warnings = (*limits_report.unwell_lines(measured), *limits_report.busy_lines(measured))
    warned = [f"<p><b>{escape(line)}</b></p>" for line in warnings]
    return document(f"Limits of {measured.device}", limits_report.heading(measured), *warned, rows_as_table, *curves)


def bench(run: Run, picture: str) -> str:
    """The roofline and every row behind it."""
    names = ("op", "", "shape", "dtype", "provider", "time", "floor", "of limit", "bound", "kernel", "note")
    sides = ("", "", "", "", "", "r", "r", "r", "note", "note", "note")
    rows: list[Row] = []
    for case in bench_report.cases(run.rows):
        best = bench_report.fastest(case)
        for index, row in enumerate(case):
            case_cells = (row.op, row.direction, shape_text(row.shape), bench_report.dtype_text(row.dtype))
            figures = (units.text(row.median_s, "s"), units.text(row.floor_s, "s"), units.percent(row.fraction))
            cells = (*case_cells, row.provider, *figures, row.bound, row.kernel[:60], bench_report.note(row))
            bad = bench_report.too_good(row) or bench_report.wrong(row)
            kind = " ".join(
                filter(None, ("top" if index == 0 and rows else "", "error" if bad else "best" if row is best else ""))
            )
            rows.append((kind, list(zip(sides, cells, strict=True))))
    lead = f"Floors: {limits_report.heading(run.limits)}. Bold: the fastest of its case."
    wrong = [f"<p><b>{escape(line)}</b></p>" for line in bench_report.warnings(run)]
    wrong += [f'<p class="error">{escape(line)}</p>' for line in bench_report.errors(run.rows)]
    rows_as_table = table(list(zip(sides, names, strict=True)), rows)
    return document(f"Benchmark of {run.gpu}", lead, picture, *wrong, rows_as_table)


def write(document: str, path: Path) -> None:
    write_file(document, path)
