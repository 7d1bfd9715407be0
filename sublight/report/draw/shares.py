"""Curves over a share on a logarithmic axis, as SVG: light and dark by the reader's own theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from sublight import units
from sublight.errors import BadInput
from sublight.report.draw import page, plot
from sublight.report.draw.svg import BOTTOM, HEIGHT, INK, LEFT, RIGHT, TOP, WIDTH, Theme, _line, _text, share, style
from sublight.results import write_file

FIRST_SHADE = 5  # in INK: paper, ink, faint ink, grid and roof come before the curves' colours


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The curve of one way (of pruning, say): points (x, y, half of the range of y) from left to right."""

    name: str
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """A chart of several ways; x falls from left to right, as a share of weights does."""

    title: str
    x_title: str
    y_title: str
    curves: tuple[Curve, ...]

    @property
    def window(self) -> tuple[tuple[float, float], tuple[float, float]]:
        points = [point for curve in self.curves for point in curve.points]
        if not points or min(x for x, _, _ in points) <= 0:
            raise BadInput("nothing to draw: curves need points with a share above zero")
        xs = [x for x, _, _ in points]
        low, high = min(y - spread for _, y, spread in points), max(y + spread for _, y, spread in points)
        room = 0.05 * (high - low) or 0.05
        smallest, largest = min(xs), max(xs)
        return (smallest / 1.15, largest * 1.15), (low - room, high + room)


def svg(chart: Curves, *, themes: Sequence[Theme] = ("light", "dark")) -> str:
    """The whole picture."""
    (left, right), (low, high) = chart.window
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return WIDTH - RIGHT - wide * share(x, (left, right)), HEIGHT - BOTTOM - tall * (y - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>{escape(chart.title)}</title>",
        style(themes),
        _strokes(themes),
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(LEFT, 30, chart.title, "ink", extra='style="font-weight:600;font-size:15px"'),
    ]
    for tick in sorted({x for curve in chart.curves for x, _, _ in curve.points}):
        x, _ = at(tick, low)
        parts += [_line(x, TOP, x, HEIGHT - BOTTOM, "grid"), _tick(x, tick)]
    for value in ticks(low, high):
        _, y = at(left, value)
        words = units.percent(value)
        parts += [_line(LEFT, y, WIDTH - RIGHT, y, "grid"), _text(LEFT - 10, y + 4.5, words, "faint", anchor="end")]
    parts.append(_text(LEFT + wide / 2, HEIGHT - BOTTOM + 44, chart.x_title, "ink", anchor="middle"))
    parts.append(_text(LEFT, TOP - 8, chart.y_title, "faint"))
    x = float(LEFT)
    for number, curve in enumerate(chart.curves):
        places = [at(share_left, y) for share_left, y, _ in curve.points]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline class="l{number}" points="{line}"/>')
        for (a, b), (share_left, y, spread) in zip(places, curve.points, strict=True):
            if spread:
                (_, top), (_, bottom) = at(share_left, y + spread), at(share_left, y - spread)
                parts.append(_line(a, top, a, bottom, f"l{number}"))
            words = escape(f"{curve.name}: {units.percent(y)} with {units.percent(share_left)} left")
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4.5" class="p{number}"><title>{words}</title></circle>')
        parts.append(f'<circle cx="{x + 6:.1f}" cy="54" r="5" class="p{number}"/>')
        parts.append(_text(x + 16, 58.5, curve.name, "ink"))
        x += 34 + 7.2 * len(curve.name)
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Round shares inside a window, four at least where it is not empty.

    >>> ticks(0.055, 0.93)
    [0.2, 0.4, 0.6, 0.8]
    """
    step = next(step for step in (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 1e-9) if (high - low) / step >= 4)
    first = math.ceil(low / step)
    return [round(step * number, 9) for number in range(first, first + 8) if step * number <= high]


def _tick(x: float, value: float) -> str:
    return _text(x, HEIGHT - BOTTOM + 20, f"{100 * value:.3g} %", "faint", anchor="middle")


def _strokes(themes: Sequence[Theme]) -> str:
    """Lines in the colours that the marks have."""

    def rules(theme: Theme) -> str:
        shades = enumerate(INK[theme][FIRST_SHADE:])
        return "".join(f".l{number}{{stroke:{shade};fill:none;stroke-width:2}}" for number, shade in shades)

    first, *others = themes
    more = "".join(f"@media(prefers-color-scheme:{theme}){{{rules(theme)}}}" for theme in others)
    return f"<style>{rules(first)}{more}</style>"


def write(charts: Sequence[Curves], path: Path, *, title: str, lead: str) -> None:
    """All charts as one page; of a single one also a picture or pixels."""
    plot.check(path.name)
    if path.suffix.lower() == ".html":
        write_file(page.document(title, lead, *map(svg, charts)), path)
    elif len(charts) != 1:
        raise BadInput(f"{len(charts)} charts make a page: give a name that ends in .html")
    elif path.suffix.lower() == ".svg":
        write_file(svg(charts[0]), path)
    else:
        write_file(plot.pixels(svg(charts[0], themes=("light",))), path)
