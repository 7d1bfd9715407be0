"""Charts as SVG by hand: one file, no script, light and dark by the reader's own theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Literal

from sublight import units
from sublight.report.draw.roofline import Chart, Point, Roof, colour, decades

Theme = Literal["light", "dark"]
WIDTH, HEIGHT = 960, 560
LEFT, RIGHT, TOP, BOTTOM = 104, 24, 84, 88
DODGE = 9  # pixels between providers of one case, which all have the same intensity
LABEL_AT = 0.72  # along a slope, above where memory-bound ops lie
INK = {  # paper, ink, faint ink, grid, roof, then a colour for each provider (told apart also by the colour-blind)
    "light": (
        "#ffffff",
        "#1f2328",
        "#59636e",
        "#e4e8ec",
        "#6e7781",
        "#0060a8",
        "#d35400",
        "#00875f",
        "#b5478a",
        "#8a6d00",
        "#6e7781",
    ),
    "dark": (
        "#0d1117",
        "#e6edf3",
        "#9198a1",
        "#232a33",
        "#8b949e",
        "#58b4f5",
        "#ff9248",
        "#35d0a0",
        "#f08cc6",
        "#e5c044",
        "#9198a1",
    ),
}


def style(themes: Sequence[Theme]) -> str:
    """Rules of the first theme, and of the second for readers who prefer it; not every renderer knows variables."""
    first, *others = themes
    rules = _rules(first) + "".join(f"@media(prefers-color-scheme:{theme}){{{_rules(theme)}}}" for theme in others)
    return f"<style>text{{font:13px system-ui,'DejaVu Sans',sans-serif}}{rules}</style>"


def _rules(theme: Theme) -> str:
    paper, ink, faint, grid, roof, *providers = INK[theme]
    rules = f".paper{{fill:{paper}}}.ink{{fill:{ink}}}.faint{{fill:{faint}}}.grid{{stroke:{grid}}}"
    rules += f".roof{{stroke:{roof};fill:none;stroke-width:1.5}}.name{{fill:{roof}}}"
    return rules + "".join(f".p{index}{{fill:{shade};stroke:{paper}}}" for index, shade in enumerate(providers))


def roofline(chart: Chart, *, themes: Sequence[Theme] = ("light", "dark")) -> str:
    """The whole picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>Roofline of {escape(chart.title)}</title>",
        style(themes),
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(LEFT, 30, chart.title, "ink", extra='style="font-weight:600;font-size:15px"'),
        *_legend(chart),
        *_grid(chart),
        *(_roof(chart, roof) for roof in chart.roofs),
        *_points(chart),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(chart: Chart, intensity: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * share(intensity, chart.x)


def _y(chart: Chart, rate: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share(rate, chart.y)


def share(value: float, window: tuple[float, float]) -> float:
    """
    >>> share(10, (1, 100))
    0.5
    """
    low, high = (math.log10(end) for end in window)
    return (math.log10(value) - low) / (high - low)


def _text(x: float, y: float, words: str, kind: str, *, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, extra: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}" {extra}/>'


def _legend(chart: Chart) -> list[str]:
    parts, x = [], float(LEFT)
    for name in chart.providers:
        parts.append(f'<circle cx="{x + 6:.1f}" cy="54" r="5" class="p{colour(name)}"/>')
        parts.append(_text(x + 16, 58.5, name, "ink"))
        x += 34 + 7.2 * len(name)
    words = "circle: forward, square: backward; the providers of one case are drawn side by side"
    if chart.left_out:
        words += f"; rows without arithmetic: {chart.left_out}"
    return [*parts, _text(LEFT, HEIGHT - 14, words, "faint")]


def _grid(chart: Chart) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in decades(*chart.x):
        x = _x(chart, tick)
        parts += [_line(x, TOP, x, bottom, "grid"), _text(x, bottom + 20, f"{tick:g}", "faint", anchor="middle")]
    for tick in decades(*chart.y):
        y = _y(chart, tick)
        words = units.text(tick, "FLOP/s").replace(".00", "").replace(".0", "")
        parts += [_line(LEFT, y, right, y, "grid"), _text(LEFT - 10, y + 4.5, words, "faint", anchor="end")]
    parts.append(_text((LEFT + right) / 2, bottom + 44, "FLOP for each byte moved", "ink", anchor="middle"))
    return parts


def _roof(chart: Chart, roof: Roof) -> str:
    left, right = chart.x
    if roof.flat:
        y = _y(chart, roof.value)
        line = _line(LEFT, y, WIDTH - RIGHT, y, "roof", 'stroke-dasharray="6 4"')
        return line + _text(LEFT + 8, y - 7, roof.label, "name")
    low, high = chart.y
    begin, end = max(left, low / roof.value), min(right, high / roof.value)
    x1, y1, x2, y2 = _x(chart, begin), _y(chart, roof.at(begin)), _x(chart, end), _y(chart, roof.at(end))
    x, y = x1 + LABEL_AT * (x2 - x1), y1 + LABEL_AT * (y2 - y1)
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    turn = f'transform="rotate({angle:.1f} {x:.1f} {y:.1f})"'
    return _line(x1, y1, x2, y2, "roof") + _text(x, y - 8, roof.label, "name", anchor="middle", extra=turn)


def _points(chart: Chart) -> list[str]:
    order = {name: index for index, name in enumerate(chart.providers)}
    middle = (len(order) - 1) / 2
    return [_mark(chart, point, DODGE * (order[point.row.provider] - middle)) for point in reversed(chart.points)]


def _mark(chart: Chart, point: Point, shift: float) -> str:
    x, y, kind = _x(chart, point.intensity) + shift, _y(chart, point.rate), f"p{colour(point.row.provider)}"
    if point.row.direction == "fwd":
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="{kind}">'
        return f"{shape}<title>{escape(point.label)}</title></circle>"
    shape = f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" class="{kind}">'
    return f"{shape}<title>{escape(point.label)}</title></rect>"
