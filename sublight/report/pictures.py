"""The README's pictures and the docs' tables, from a results file: python -m sublight.report.pictures RUN.json docs/"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sublight.errors import BadInput
from sublight.report import bench, limits, markdown
from sublight.report.draw.tables import titled
from sublight.results import Result, Run, read_run, write_file

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.terminal_theme import TerminalTheme

COLUMNS = 100
CASES = 6  # a picture shows one case of each op and direction; the docs' page shows all
USUAL_COLS = 4096  # the hidden size of many a model
# rich's own frame fetches a font from the network, which a README's picture may not: this one takes what is there
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; }}
.{unique_id}-matrix {{ font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: system-ui, sans-serif; font-size: 16px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def one_of_each(run: Run, *, cases: int = CASES) -> Run:
    """One case of each op and direction, the one of a usual width or the largest: what fits in a picture."""
    import dataclasses

    chosen: dict[tuple[str, str], list[Result]] = {}
    for case in bench.cases(run.rows):
        key = (case[0].op, case[0].direction)
        if key not in chosen or _weight(case[0]) > _weight(chosen[key][0]):
            chosen[key] = case
    rows = [row for case in list(chosen.values())[:cases] for row in case if row.median_s]
    return dataclasses.replace(run, rows=tuple(rows))


def _weight(row: Result) -> tuple[bool, int]:
    return row.shape.get("cols") == USUAL_COLS, row.bytes


def picture(title: str, shown: RenderableType, theme: TerminalTheme) -> str:
    """What the terminal shows, as SVG."""
    import io

    from rich.console import Console

    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), highlight=False, force_terminal=True, color_system="truecolor"
    )
    console.print(shown, "")  # an empty last line: some fonts reach below their line
    svg = console.export_svg(title=title, theme=theme, code_format=FRAME, unique_id=re.sub(r"\W+", "-", title))
    on_light = sum(theme.background_color) > 3 * 128
    svg = svg.replace("rgba(255,255,255,0.35)", f"rgba({'0,0,0' if on_light else '255,255,255'},0.25)")  # the frame
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def themes() -> Mapping[str, TerminalTheme]:
    """A dark and a light terminal; GitHub shows each reader the fitting one."""
    from rich.terminal_theme import TerminalTheme

    dark = [
        (72, 79, 88),
        (255, 123, 114),
        (74, 194, 107),
        (240, 178, 79),
        (88, 166, 255),
        (188, 140, 255),
        (86, 212, 221),
        (201, 209, 217),
    ]
    light = [
        (36, 41, 47),
        (193, 18, 31),
        (26, 127, 55),
        (154, 103, 0),
        (9, 105, 218),
        (130, 80, 223),
        (5, 110, 124),
        (110, 119, 129),
    ]
    return {
        "dark": TerminalTheme((13, 17, 23), (230, 237, 243), dark),
        "light": TerminalTheme((255, 255, 255), (31, 35, 40), light),
    }


def write(run: Run, folder: Path) -> list[Path]:
    """All pictures and pages of this run; gives their names."""
    shown = {
        "limits": titled(limits.heading(run.limits), limits.table(run.limits)),
        "bench": titled(bench.heading(run), bench.table(one_of_each(run))),
    }
    written = []
    for name, renderable in shown.items():
        for theme, colours in themes().items():
            path = folder / "images" / f"{name}-{theme}.svg"
            write_file(picture(f"sublight {name}", renderable, colours), path)
            written.append(path)
    write_file(markdown.page(run), folder / "benchmarks.md")
    return [*written, folder / "benchmarks.md"]


def main(words: Sequence[str]) -> int:
    if len(words) != 2:
        return _complain("write: python -m sublight.report.pictures RUN.json FOLDER")
    try:
        written = write(read_run(Path(words[0])), Path(words[1]))
    except BadInput as error:
        return _complain(str(error))
    print("\n".join(f"wrote {path}" for path in written))
    return 0


def _complain(words: str) -> int:
    print(f"sublight: {words}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
