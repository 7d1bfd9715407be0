"""Where memory went: the peak in a sentence, its timeline, what was live then, and what lowers it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from sublight import units
from sublight.report.draw import page as pages
from sublight.report.draw import svg
from sublight.report.draw.tables import note, plain
from sublight.trace.memory.ledger import decimate
from sublight.trace.memory.report import MemoryReport, MemoryRow

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

ROWS = 15
LINES = 8  # height of the terminal's chart
MARGIN = 11
COLUMNS = 100  # the chart's width at most
STYLES = ("bright_blue", "dark_orange", "green", "magenta", "yellow", "white")  # one for each curve
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 300, 84, 16, 34, 36
POINTS = 600  # of a drawn curve: more than one for every second pixel shows nothing
Curves = Mapping[str, Sequence[int]]


def sentence(report: MemoryReport) -> str:
    """A sentence: how high the peak is, when, and how much was reserved then."""
    words = f"{report.device} peaks at {units.text(report.peak_bytes, 'B')}"
    if report.duration_s > 0:
        words += f", {units.text(report.peak_time_s, 's')} into the {units.text(report.duration_s, 's')} recorded"
    if report.reserved_at_peak_bytes and report.fragmentation_bytes is not None:
        share = units.percent(report.fragmentation_bytes / report.reserved_at_peak_bytes)
        words += f"; {units.text(report.reserved_at_peak_bytes, 'B')} were reserved then, {share} of it not in use"
    if report.stuck_bytes:
        words += f" ({units.text(report.stuck_bytes, 'B')} in holes, {units.text(report.cached_bytes, 'B')} cached)"
    return f"{words}."


def to_json(report: MemoryReport) -> dict[str, Any]:
    return report.to_json()


def page(report: MemoryReport) -> RenderableType:
    """The report for the terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(sentence(report), style="bold"), Text("")]
    if report.duration_s > 0:
        parts += [_Chart(report), Text("")]
    parts += [_table(report, report.rows, "live at the peak"), Text("")]
    if len(report.modules) > 1:
        parts += [_table(report, report.modules, "by module"), Text("")]
    for advice in report.advice:
        parts.append(Text.assemble(("− " + units.text(advice.saving_bytes, "B"), "bold green"), f"  {advice.title}"))
        parts += [Text(f"    {line}", style="dim") for line in advice.evidence]
        parts += [Text(f"    {line}") for line in advice.fix.splitlines()]
        parts.append(Text(""))
    if not report.advice:
        parts += [Text("Nothing stands out that would lower the peak by more than 1 %."), Text("")]
    return Group(*parts, *(Text(f"note: {words}", style="dim") for words in report.notes))


def _table(report: MemoryReport, rows: Sequence[MemoryRow], title: str) -> Table:
    """The largest entries, and one line for all others, so that the column adds up to the peak."""
    from rich.markup import escape as plain_text

    out = plain((title, "at", "bytes", "share", "blocks", "kind"), right=("bytes", "share", "blocks"), fold=(title,))
    if not any(row.source for row in rows):
        out.columns[1].width = 2
    for row in _shortened(rows):
        share = units.percent(row.bytes / max(1, report.peak_bytes))
        name = note(_tail(row.name), "")
        out.add_row(
            name, plain_text(row.source), units.text(row.bytes, "B"), share, f"{row.count:,}", note(row.category)
        )
    return out


def _tail(name: str, most: int = 60) -> str:
    """A path's end says more than its beginning.

    >>> _tail("Model › Block › Linear", 12)
    '…ck › Linear'
    """
    return name if len(name) <= most else f"…{name[len(name) - most + 1 :]}"


def _shortened(rows: Sequence[MemoryRow]) -> Iterator[MemoryRow]:
    yield from rows[:ROWS]
    rest = rows[ROWS:]
    if rest:
        size, count = sum(row.bytes for row in rest), sum(row.count for row in rest)
        yield MemoryRow(name=f"{len(rest):,} more", source="", category="", bytes=size, count=count)


class _Chart:
    """Live bytes over time in blocks, coloured by category; as wide as the terminal."""

    def __init__(self, report: MemoryReport) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield chart(self.report, columns=min(options.max_width, COLUMNS))


def chart(report: MemoryReport, *, columns: int, lines: int = LINES) -> Text:
    """The timeline in so many columns: each shows the most that was live in its stretch of time."""
    from rich.text import Text

    width, top = max(8, columns - MARGIN), max(1, report.peak_bytes)
    shown = columns_of(report.times_s, report.live_bytes, width)
    names = list(report.by_category)
    stacked = np.cumsum([np.array(report.by_category[name])[shown] for name in names], axis=0)  # (category, column)
    out = Text()
    for line in range(lines):
        floor = top * (lines - 1 - line) / lines
        label = units.text(report.peak_bytes, "B") if line == 0 else ""
        out.append(f"{label:>{MARGIN - 2}} │", style="dim")
        for column in range(width):
            height = (float(stacked[-1, column]) - floor) / (top / lines)
            if height <= 0.06:
                out.append(" ")
                continue
            middle = floor + min(1.0, height) * top / lines / 2
            index = int(np.searchsorted(stacked[:, column], middle))
            out.append(BLOCKS[min(7, max(0, round(8 * height) - 1))], style=STYLES[min(index, 5)])
        out.append("\n")
    end = units.text(report.duration_s, "s")
    out.append(f"{'0 s':>{MARGIN - 2}} └{'─' * (width - len(end) - 1)} {end}\n", style="dim")
    used = columns  # the first name begins a line
    for index, name in enumerate(names):
        words = f"{name} {units.percent(report.categories.get(name, 0) / top)}"
        used += len(words) + 5
        if used > columns:
            out.append(("\n" if index else "") + " " * MARGIN)
            used = MARGIN + len(words) + 2
        else:
            out.append("   ")
        out.append("█ ", style=STYLES[index])
        out.append(words)
    return out


def columns_of(times_s: Sequence[float], values: Sequence[int], width: int) -> list[int]:
    """For each column of time, the index of its greatest value; a column without a point shows what was before it.

    >>> columns_of([0.0, 0.1, 0.2, 3.9, 4.0], [1, 9, 2, 4, 3], 4)
    [1, 2, 2, 3]
    """
    ends = np.linspace(times_s[0], times_s[-1], width + 1)[1:]
    edges = [0, *np.searchsorted(times_s, ends[:-1], side="left").tolist(), len(times_s)]
    array, shown = np.asarray(values), []
    for begin, end in itertools.pairwise(edges):
        shown.append(begin + int(array[begin:end].argmax()) if begin < end else max(0, begin - 1))
    return shown


def html(report: MemoryReport) -> str:
    """One self-contained page."""
    return pages.document(f"Memory of {report.source}", sentence(report), section(report))


def section(report: MemoryReport) -> str:
    """Charts, tables and advice, for a page of its own or within another."""
    parts = []
    if report.duration_s > 0:
        parts += [_styles(), area(report, report.by_category, "by category")]
        if len(report.by_module) > 1:
            parts.append(area(report, report.by_module, "by module"))
    parts.append(f"<h2>What lowers it</h2>{''.join(_advice(report))}")
    parts += ["<h2>Live at the peak</h2>", _html_table(report, report.rows)]
    if len(report.modules) > 1:
        parts += ["<h2>By module</h2>", _html_table(report, report.modules)]
    parts += [f'<p class="note">{escape(words)}</p>' for words in report.notes]
    return "".join(parts)


def _advice(report: MemoryReport) -> Iterator[str]:
    if not report.advice:
        yield "<p>Nothing stands out that would lower the peak by more than 1 %.</p>"
    for advice in report.advice:
        saving = f'<b class="normal">− {escape(units.text(advice.saving_bytes, "B"))}</b>'
        evidence = "<br>".join(escape(line) for line in advice.evidence)
        yield f'<h3 id="{escape(advice.id)}">{saving} {escape(advice.title)}</h3><p>{evidence}</p>'
        yield f'<div class="wide"><pre>{escape(advice.fix)}</pre></div>'


def _html_table(report: MemoryReport, rows: Sequence[MemoryRow]) -> str:
    sides = ("", "", "r", "r", "r", "note")
    cells: list[pages.Row] = []
    for row in _shortened(rows):
        figures = (units.text(row.bytes, "B"), units.percent(row.bytes / max(1, report.peak_bytes)), f"{row.count:,}")
        words = (_tail(row.name, 120), row.source, *figures, row.category)
        cells.append(("", list(zip(sides, words, strict=True))))
    return pages.table(list(zip(sides, ("name", "at", "bytes", "share", "blocks", "kind"), strict=True)), cells)


def _styles() -> str:
    light, dark = svg.INK["light"][5:], svg.INK["dark"][5:]
    rules = "".join(f".m{index}{{fill:{shade}}}" for index, shade in enumerate(light))
    other = "".join(f".m{index}{{fill:{shade}}}" for index, shade in enumerate(dark))
    lines = ".memory text{font:13px system-ui,sans-serif;fill:var(--ink)}.memory line{stroke:var(--line)}"
    lines += ".memory .peak{stroke:var(--error);stroke-dasharray:4 3}h3{font-size:15px;margin:18px 0 0}"
    return f"<style>{rules}{lines}@media(prefers-color-scheme:dark){{{other}}}</style>"


def area(report: MemoryReport, curves: Curves, title: str) -> str:
    """Stacked areas over time, as SVG; memory holds its level between two events, so edges are steps."""
    points = decimate(np.array(report.live_bytes), POINTS)
    times = np.array(report.times_s)[points]
    top = max(1, report.peak_bytes)
    across = LEFT + (WIDTH - LEFT - RIGHT) * times / report.duration_s
    parts = [
        f'<svg class="memory" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"Live memory {title}: {sentence(report)}")}">'
    ]
    parts += _grid(report)
    under = np.zeros(len(points))
    at = float(LEFT)
    for index, (name, curve) in enumerate(curves.items()):
        over = under + np.array(curve)[points]
        held = escape(f"{name}: at most {units.text(max(curve), 'B')}")
        parts.append(f'<path class="m{index % 6}" d="{_path(across, over / top, under / top)}"><title>{held}</title>')
        parts.append("</path>")
        label = _tail(name, 24)
        parts.append(f'<rect class="m{index % 6}" x="{at:.0f}" y="8" width="12" height="12"/>')
        parts.append(f'<text x="{at + 17:.0f}" y="18.5">{escape(label)}</text>')
        at += 36 + 7.0 * len(label)
        under = over
    x = LEFT + (WIDTH - LEFT - RIGHT) * report.peak_time_s / report.duration_s
    parts.append(f'<line class="peak" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/></svg>')
    return "".join(parts)


def _grid(report: MemoryReport) -> Iterator[str]:
    for quarter in range(5):
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * quarter / 4
        label = units.text(report.peak_bytes * quarter / 4, "B")
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">{label}</text>'
        x = LEFT + (WIDTH - LEFT - RIGHT) * quarter / 4
        anchor = "start" if quarter == 0 else "end" if quarter == 4 else "middle"
        seconds = units.text(report.duration_s * quarter / 4, "s")
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="{anchor}">{seconds}</text>'


def _path(across: Any, over: Any, under: Any) -> str:
    """Along the upper edge to the right, back along the lower one."""
    scale, base = HEIGHT - TOP - BOTTOM, HEIGHT - BOTTOM
    high, low = (base - scale * edge for edge in (over, under))
    there = f"M{across[0]:.1f} {high[0]:.1f}" + "".join(
        f"H{x:.1f}V{y:.1f}" for x, y in zip(across[1:], high[1:], strict=True)
    )
    back = f"V{low[-1]:.1f}" + "".join(
        f"V{y:.1f}H{x:.1f}" for x, y in zip(across[::-1][1:], low[::-1][1:], strict=True)
    )
    return f"{there}{back}Z"
