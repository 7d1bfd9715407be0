"""Bars of shares of a limit, in groups, as SVG: one file, no script, light and dark by the reader's own theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sublight import units
from sublight.report.draw.svg import style

WIDTH, LINE, GAP, NAMES, TOP = 960, 20, 34, 180, 56
ROOM = WIDTH - NAMES - 90  # for a bar of 100 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    name: str
    share: float  # the bar's length, as a share of the limit
    ours: bool


def bars(title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Groups of bars below one another; a dotted line marks the limit."""
    height = TOP + sum(GAP + LINE * len(group) for _, group in groups) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title>",
        style(("light", "dark")),
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text x="16" y="30" class="ink" style="font-weight:600;font-size:15px">{escape(title)}</text>',
        f'<line x1="{NAMES + ROOM}" y1="{TOP}" x2="{NAMES + ROOM}" y2="{height - 12}" class="roof" '
        'stroke-dasharray="3 4"/>',
        f'<text x="{NAMES + ROOM}" y="{TOP - 8}" class="faint" text-anchor="middle">the limit</text>',
    ]
    y = float(TOP)
    for name, group in groups:
        parts.append(f'<text x="16" y="{y + 18:.0f}" class="ink" style="font-weight:600">{escape(name)}</text>')
        y += GAP - 6
        for bar in group:
            wide = ROOM * min(bar.share, 1.0)
            shade = "p0" if bar.ours else "p5"
            parts.append(
                f'<text x="{NAMES - 8}" y="{y + 13:.0f}" class="ink" text-anchor="end">{escape(bar.name)}</text>'
            )
            parts.append(f'<rect x="{NAMES}" y="{y + 2:.0f}" width="{wide:.1f}" height="{LINE - 6}" class="{shade}"/>')
            parts.append(
                f'<text x="{NAMES + wide + 6:.1f}" y="{y + 13:.0f}" class="faint">{units.percent(bar.share)}</text>'
            )
            y += LINE
        y += 6
    return "\n".join([*parts, "</svg>"]) + "\n"
