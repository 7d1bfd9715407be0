"""The roofline of a run: as a page, a picture or pixels in a file, and in characters in the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sublight.errors import BadInput
from sublight.report.draw import canvas, page, roofline, svg
from sublight.results import Run, write_file

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

SUFFIXES = (".html", ".svg", ".png")


def check(name: str) -> None:
    """Refuse a plot's name that cannot be written, before anything is measured."""
    if not name:
        return
    if Path(name).suffix.lower() not in SUFFIXES:
        raise BadInput(f"cannot plot to {name!r}: the name must end in {', '.join(SUFFIXES)}")
    if Path(name).suffix.lower() == ".png":
        _resvg()


def _resvg() -> object:
    try:
        import resvg_py
    except ImportError:
        raise BadInput("a PNG needs resvg-py: pip install 'sublight[plot]', or plot to .svg or .html") from None
    return resvg_py


def write(run: Run, path: Path) -> None:
    """The plot as a page, a picture that follows the reader's light or dark theme, or pixels."""
    check(path.name)
    drawn = roofline.chart(run)
    if drawn is None:
        raise BadInput(
            "nothing to plot: no timed row has both arithmetic and a measured limit; the table has every row"
        )
    if path.suffix.lower() == ".html":
        write_file(page.bench(run, svg.roofline(drawn)), path)
    elif path.suffix.lower() == ".svg":
        write_file(svg.roofline(drawn), path)
    else:
        write_file(pixels(svg.roofline(drawn, themes=("light",))), path)


def pixels(picture: str) -> bytes:
    """An SVG picture as a PNG."""
    return bytes(_resvg().svg_to_bytes(svg_string=picture, zoom=2))  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A chart in characters, drawn as wide as the terminal that prints it allows."""

    chart: roofline.Chart
    most_columns: int = 96
    lines: int = 20

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield canvas.roofline(self.chart, columns=min(self.most_columns, options.max_width), lines=self.lines)


def terminal(run: Run) -> Drawing | None:
    """The same chart for the terminal; None where there is nothing to draw."""
    chart = roofline.chart(run)
    return Drawing(chart=chart) if chart else None
