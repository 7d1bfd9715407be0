"""Charts in characters: roofs in braille dots, a mark for each timed row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublight import units
from sublight.report.draw.roofline import Chart, colour, decades
from sublight.report.draw.svg import share

if TYPE_CHECKING:
    from rich.text import Text

STYLES = ("bright_blue", "dark_orange", "green", "magenta", "yellow", "white")
MARGIN = 13  # columns for the names on the vertical axis
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character, by row and column


def roofline(chart: Chart, *, columns: int, lines: int) -> Text:
    """The chart, its axes and its legend, within so many columns and lines."""
    from rich.text import Text

    width, height = columns - MARGIN, lines
    cells = [[" "] * width for _ in range(height)]
    styles = [["dim"] * width for _ in range(height)]
    _draw_roofs(chart, cells)
    for point in reversed(chart.points):  # drawn last to first, so that ours, which come first in a case, lie on top
        x, y = _place(point.intensity, chart.x, width), height - 1 - _place(point.rate, chart.y, height)
        cells[y][x] = "●" if point.row.direction == "fwd" else "■"
        styles[y][x] = STYLES[colour(point.row.provider)]
    out = Text()
    ticks = {height - 1 - _place(tick, chart.y, height): units.text(tick, "FLOP/s") for tick in decades(*chart.y)}
    for y, row in enumerate(cells):
        name = ticks.get(y, "").replace(".00", "").replace(".0", "")
        out.append(f"{name:>{MARGIN - 2}} │" if y not in ticks else f"{name:>{MARGIN - 2}} ┤", style="dim")
        for x, character in enumerate(row):
            out.append(character, style=styles[y][x])
        out.append("\n")
    _draw_axis(chart, width, out)
    _draw_legend(chart, out)
    return out


def _place(value: float, window: tuple[float, float], cells: int) -> int:
    """
    >>> _place(10, (1, 100), 21), _place(1e9, (1, 100), 21)
    (10, 20)
    """
    return min(cells - 1, max(0, round(share(value, window) * (cells - 1))))


def _draw_roofs(chart: Chart, cells: list[list[str]]) -> None:
    height, width = len(cells), len(cells[0])
    left, right = chart.x
    for roof in chart.roofs:
        for dot in range(2 * width):
            intensity = left * (right / left) ** (dot / (2 * width - 1))
            height_share = share(roof.at(intensity), chart.y)
            if not 0 <= height_share <= 1 or (roof.flat and dot % 4):
                continue
            line = 4 * height - 1 - round(height_share * (4 * height - 1))
            here = cells[line // 4][dot // 2]
            bits = (ord(here) if here != " " else 0x2800) | _DOTS[line % 4][dot % 2]
            cells[line // 4][dot // 2] = chr(bits)
    for roof in chart.roofs:
        if roof.flat:
            line = height - 1 - _place(roof.value, chart.y, height)
            above = max(0, line - 1)
            label = roof.label
            cells[above][width - len(label) :] = list(label)


def _draw_axis(chart: Chart, width: int, out: Text) -> None:
    marks, names = ["─"] * width, [" "] * width
    for tick in decades(*chart.x):
        at = _place(tick, chart.x, width)
        marks[at] = "┬"
        name = f"{tick:g}"
        names[max(0, at - len(name) // 2) : max(0, at - len(name) // 2) + len(name)] = list(name)
    out.append(" " * (MARGIN - 1) + "└" + "".join(marks) + "\n", style="dim")
    out.append(" " * MARGIN + "".join(names).rstrip() + " FLOP/B\n", style="dim")


def _draw_legend(chart: Chart, out: Text) -> None:
    out.append(" " * MARGIN)
    for name in chart.providers:
        out.append("● ", style=STYLES[colour(name)])
        out.append(f"{name}   ")
    slopes = ", ".join(roof.label for roof in chart.roofs if not roof.flat)
    out.append(f"\n{' ' * MARGIN}● forward  ■ backward; the slope: {slopes}", style="dim")
    if chart.left_out:
        out.append(f"; rows without arithmetic: {chart.left_out}", style="dim")
