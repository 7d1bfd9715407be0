"""Spans of time in lanes: a row of text for a terminal, a picture as SVG by the reader's own theme."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

from sublight import units
from sublight.report.draw.curves import ticks
from sublight.report.draw.svg import style

WIDTH, NAMES, RIGHT, LINE, TOP, BOTTOM = 960, 96, 20, 30, 46, 40
COLUMNS = 64  # characters of a row of text
SHADES = 4


class Spanning(Protocol):
    @property
    def lane(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def elapsed_s(self) -> float: ...


def _ends(spans: Sequence[Spanning]) -> tuple[float, float]:
    first = min((span.start_s for span in spans), default=0.0)
    return first, max((span.start_s + span.elapsed_s for span in spans), default=0.0) - first or 1.0


def text(spans: Sequence[Spanning]) -> str:
    """A lane a line; a span is drawn by its name's last letter, and is at least one letter wide."""
    first, whole = _ends(spans)
    lanes = list(dict.fromkeys(span.lane for span in spans))
    wide = max(map(len, lanes), default=0)
    lines = []
    for lane in lanes:
        row = [" "] * COLUMNS
        for span in spans:
            if span.lane == lane:
                start = min(int(COLUMNS * (span.start_s - first) / whole), COLUMNS - 1)
                end = max(start + 1, round(COLUMNS * (span.start_s + span.elapsed_s - first) / whole))
                row[start:end] = span.name[-1:] * (min(end, COLUMNS) - start)
        lines.append(f"{lane:<{wide}} |{''.join(row)}|")
    return "\n".join([*lines, f"{'':<{wide}}  0{units.text(whole, 's'):>{COLUMNS - 1}}"])


def svg(title: str, spans: Sequence[Spanning]) -> str:
    first, whole = _ends(spans)
    lanes = list(dict.fromkeys(span.lane for span in spans))
    height = TOP + LINE * len(lanes) + BOTTOM
    room = WIDTH - NAMES - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title>",
        style(("light", "dark")),
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text x="16" y="26" class="ink" style="font-weight:600">{escape(title)}</text>',
    ]
    bottom = TOP + LINE * len(lanes)
    for tick_ms in ticks(0, 1e3 * whole, 8):
        x = NAMES + room * tick_ms / (1e3 * whole)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text class="faint" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick_ms:g}</text>')
    parts.append(f'<text class="faint" x="{NAMES - 8}" y="{bottom + 18}" text-anchor="end">ms</text>')
    for row, lane in enumerate(lanes):
        y = TOP + LINE * row
        parts.append(f'<text class="ink" x="{NAMES - 8}" y="{y + 19}" text-anchor="end">{escape(lane)}</text>')
        for span in (span for span in spans if span.lane == lane):
            x, wide = NAMES + room * (span.start_s - first) / whole, max(1.0, room * span.elapsed_s / whole)
            words = f"{span.lane} {span.name}: {units.text(span.elapsed_s, 's')}"
            parts.append(
                f'<rect class="p{row % SHADES}" x="{x:.1f}" y="{y + 3}" width="{wide:.1f}" height="{LINE - 6}">'
                f"<title>{escape(words)}</title></rect>"
            )
            if wide >= 8 * len(span.name) + 4:
                at = f'x="{x + wide / 2:.1f}" y="{y + 19}"'
                parts.append(f'<text class="paper" {at} text-anchor="middle">{escape(span.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
