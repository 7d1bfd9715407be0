"""Curves over a common axis as SVG: one file, no script, light and dark by the reader's own theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sublight.report.draw.svg import INK, Theme, style

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 380, 70, 20, 56, 46
POINTS = 800  # of a drawn curve: more than one a pixel shows nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]
    marked: bool = False  # draw a dot at each point, for curves of few points


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high.

    >>> ticks(0, 1000), ticks(1.3, 4.2)
    ([0.0, 200.0, 400.0, 600.0, 800.0, 1000.0], [1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    """
    size = max(high - low, 1e-12) / most
    unit = 10.0 ** math.floor(math.log10(size))
    step = next((factor * unit for factor in (1, 2, 2.5, 5) if factor * unit >= size * 0.999), 10 * unit)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 10) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def curves(title: str, drawn: Sequence[Curve], *, across: str, up: str) -> str:
    """The whole picture; curves without points are left out."""
    shown = [curve for curve in drawn if curve.points]
    every = [point for curve in shown for point in curve.points] or [(0.0, 0.0)]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    right, high = max(right, left + 1), max(high, low + 1e-6)
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * (x - left) / (right - left),
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title>",
        style(("light", "dark")),
        f"<style>{_strokes('light')}@media(prefers-color-scheme:dark){{{_strokes('dark')}}}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
    ]
    for x in ticks(left, right, 8):
        at, bottom = place(x, low)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom:.1f}"/>')
        parts.append(f'<text class="faint" x="{at:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{x:g}</text>')
    for y in ticks(low, high):
        _, at = place(left, y)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text class="faint" x="{LEFT - 8}" y="{at + 4.5:.1f}" text-anchor="end">{y:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="ink" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>')
    parts.append(f'<text class="ink" x="{LEFT}" y="{TOP - 12}">{escape(up)}</text>')
    legend = LEFT + 120.0
    for index, curve in enumerate(shown):
        thinned = curve.points[:: max(1, len(curve.points) // POINTS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in thinned))
        parts.append(f'<polyline class="c{index}" points="{path}"/>')
        if curve.marked:
            dots = (place(*point) for point in thinned)
            parts += [f'<circle class="p{index}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in dots]
        parts.append(f'<circle class="p{index}" cx="{legend:.0f}" cy="{TOP - 16}" r="5"/>')
        parts.append(f'<text class="ink" x="{legend + 12:.0f}" y="{TOP - 12}">{escape(curve.name)}</text>')
        legend += 44 + 7.2 * len(curve.name)
    return "".join([*parts, "</svg>"])


def _strokes(theme: Theme) -> str:
    shades = INK[theme][5:]
    return "".join(f".c{index}{{stroke:{shade};fill:none;stroke-width:1.6}}" for index, shade in enumerate(shades))
