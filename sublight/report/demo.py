"""Demonstrations on the terminal, as one HTML page, and as the docs' page: python -m sublight.report.demo FOLDER"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape as html_escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.extensions.demos import DEMOS
from sublight.extensions.demos.demo import Cell, Demo, Figures, Record, Table, Timeline, Unit, read_record
from sublight.report.draw import lanes
from sublight.report.draw import page as html_page
from sublight.report.draw.tables import plain, titled, wrapped
from sublight.report.markdown import escape
from sublight.report.markdown import table as markdown_table
from sublight.results import write_file

if TYPE_CHECKING:
    from rich.console import RenderableType

NONE_RECORDED = "No GPU run is recorded yet: `sublight demo --all --json FILE` on a GPU makes one."
FOLDER = "sublight/extensions/demos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One demonstration: what this machine showed, or why it has no GPU, and what a GPU showed before."""

    demo: Demo
    here: Figures | None
    why_not: str
    recorded: Record | None

    @property
    def before(self) -> Figures | None:
        """Recorded figures of a GPU, where this machine has none."""
        return self.recorded.figures.get(self.demo.name) if self.recorded and self.why_not else None


def cell(value: Cell, unit: Unit) -> str:
    """
    >>> cell(2**20, "B"), cell(1.5e-6, "s"), cell(0.5, "fraction"), cell(3, "count"), cell(1.234, "number")
    ('1.05 MB', '1.50 µs', '50 %', '3', '1.23')
    >>> cell(1471.2, "number"), cell(28.96, "number")
    ('1,471', '29.0')
    >>> cell(None, "s"), cell(2.0, "times"), cell("no", ""), cell(4.2e12, "1/s")
    ('–', '2.00×', 'no', '4.20 T/s')
    """
    if value is None or isinstance(value, str):
        return value if isinstance(value, str) else "–"
    if unit == "fraction":
        return units.percent(value)
    if unit in ("count", ""):
        return f"{value:,.0f}"
    if unit in ("number", "times"):
        digits = 2 if value < 10 else 1 if value < 100 else 0
        return f"{value:,.{digits}f}" + ("×" if unit == "times" else "")
    return units.text(value, "/s" if unit == "1/s" else unit)


def cells(table: Table) -> Iterable[list[str]]:
    for row in table.rows:
        yield [cell(value, unit) for value, (_, unit) in zip(row, table.columns, strict=True)]


def heading(record: Record) -> str:
    return f"{record.gpu}, driver {record.driver}, {record.date[:10]}, commit {record.commit}"


# the terminal


def listing(demos: Sequence[Demo], recorded: Record | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    out = plain(("demo", "question"), fold=("question",))
    for demo in demos:
        out.add_row(demo.name, wrapped(demo.question, ""))
    last = f"Recorded: {heading(recorded)}" if recorded else NONE_RECORDED.replace("`", "")
    return Group(out, Text(""), Text(f"sublight demo NAME runs one; to read: {FOLDER}/"), Text(last, style="dim"))


def page(shown: Shown) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    demo = shown.demo
    parts: list[RenderableType] = [Text(demo.question, style="bold"), Text(demo.expect), Text("")]
    if shown.here:
        if shown.why_not and shown.here.tables:
            parts.append(Text("On this machine, without a GPU:", style="dim"))
        parts += figures_on_terminal(shown.here)
    if shown.why_not:
        parts.append(Text(f"No GPU here: {shown.why_not}", style="dim"))
        if shown.recorded and shown.before:
            parts.append(Text(f"Recorded on {heading(shown.recorded)}:", style="dim"))
            parts += figures_on_terminal(shown.before)
        else:
            parts.append(Text(NONE_RECORDED.replace("`", ""), style="dim"))
    parts.append(Text(f"To read: {', '.join(f'{FOLDER}/{name}' for name in demo.files)}", style="dim"))
    return Group(*parts)


def figures_on_terminal(figures: Figures) -> list[RenderableType]:
    from rich.text import Text

    parts: list[RenderableType] = []
    for table in figures.tables:
        names = [name for name, _ in table.columns]
        texts = [name for name, unit in table.columns if not unit]
        out = plain(names, right=[name for name in names if name not in texts], fold=texts[-1:])
        for row in cells(table):
            out.add_row(*(wrapped(text, "") for text in row))
        parts += [titled(table.title, out), *([wrapped(table.note)] if table.note else []), Text("")]
    for timeline in figures.timelines:
        parts += [titled(timeline.title, Text(lanes.text(timeline.spans))), Text("")]
    parts += [Text(f"missing: {line}", style="yellow") for line in figures.missing]
    return parts


def whole(record: Record) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(heading(record), style="bold"), Text("")]
    for demo in DEMOS:
        parts.append(Text(f"{demo.name}: {demo.question}", style="bold"))
        parts += figures_on_terminal(record.figures.get(demo.name, Figures(missing=("not run",))))
    return Group(*parts)


# JSON


def list_json(demos: Sequence[Demo], recorded: Record | None) -> dict[str, Any]:
    rows = [{"name": demo.name, "question": demo.question, "files": list(demo.files)} for demo in demos]
    return {"demos": rows, "recorded": heading(recorded) if recorded else None}


def one_json(shown: Shown) -> dict[str, Any]:
    before = shown.before
    return {
        "demo": shown.demo.name,
        "question": shown.demo.question,
        "expect": shown.demo.expect,
        "no_gpu": shown.why_not or None,
        "here": shown.here.to_json() if shown.here else None,
        "recorded": before.to_json() if before else None,
        "recorded_on": heading(shown.recorded) if shown.recorded and before else None,
    }


# HTML


def figures_as_html(figures: Figures) -> str:
    parts = []
    for table in figures.tables:
        sides = ["" if not unit else "r" for _, unit in table.columns]
        rows = [("", list(zip(sides, row, strict=True))) for row in cells(table)]
        heads = list(zip(sides, (name for name, _ in table.columns), strict=True))
        parts.append(f"<h3>{html_escape(table.title)}</h3>{html_page.table(heads, rows)}")
        parts.append(f"<p>{html_escape(table.note)}</p>" if table.note else "")
    parts += [lanes.svg(each.title, each.spans) for each in figures.timelines]
    parts += [f'<p class="low">missing: {html_escape(line)}</p>' for line in figures.missing]
    return "".join(parts)


def document(record: Record) -> str:
    body = []
    for demo in DEMOS:
        figures = record.figures.get(demo.name, Figures(missing=("not run",)))
        body.append(f"<h2>{html_escape(demo.question)}</h2><p>{html_escape(demo.expect)}</p>{figures_as_html(figures)}")
    return html_page.document("Demonstrations", heading(record), *body)


def one_document(shown: Shown) -> str:
    body = [f"<p>{html_escape(shown.demo.expect)}</p>", figures_as_html(shown.here) if shown.here else ""]
    lead = f"No GPU here: {shown.why_not}" if shown.why_not else "On this machine"
    if shown.recorded and shown.before:
        body.append(f"<h2>Recorded on {html_escape(heading(shown.recorded))}</h2>{figures_as_html(shown.before)}")
    elif shown.why_not:
        body.append(f"<p>{html_escape(NONE_RECORDED)}</p>")
    return html_page.document(shown.demo.question, lead, *body)


# the docs


def picture_name(demo: Demo, index: int) -> str:
    return f"images/demo-{demo.name}-{index + 1}.svg"


def docs_page(record: Record | None) -> str:
    parts = [INTRO, f"Recorded on {escape(heading(record))}.\n" if record else f"**{NONE_RECORDED}**\n"]
    for demo in DEMOS:
        links = ", ".join(f"[{name}](../{FOLDER}/{name})" for name in demo.files)
        parts.append(f"## {demo.name}\n\n*{escape(demo.question)}* {escape(demo.expect)}\n\nTo read: {links}\n")
        figures = record.figures.get(demo.name) if record else None
        if figures:
            parts += _docs_figures(demo, figures)
    return "\n".join(parts)


def _docs_figures(demo: Demo, figures: Figures) -> Iterable[str]:
    for table in figures.tables:
        yield f"{escape(table.title)}:\n"
        yield markdown_table([name for name, _ in table.columns], cells(table))
        yield f"\n{escape(table.note)}\n" if table.note else ""
    for index, timeline in enumerate(figures.timelines):
        yield f"![{timeline.title}]({picture_name(demo, index)})\n"
    for line in figures.missing:
        yield f"Missing from this run: {escape(line)}\n"


def pictures(record: Record) -> Iterable[tuple[str, Timeline]]:
    for demo in DEMOS:
        for index, timeline in enumerate(record.figures.get(demo.name, Figures()).timelines):
            yield picture_name(demo, index), timeline


INTRO = """# Shown by running

Questions about the GPU, each answered by a program of a page or two that runs and prints figures:

```
sublight demo                        # what there is
sublight demo overlap --html o.html  # one, with its timeline as a picture
sublight demo --all --json F         # all of them, within 150 s
```

The kernels are CUDA C++ without PyTorch, compiled by nvcc at the first run, and called through the driver's own C
interface (`sublight/extensions/demos/gpu.py`), so that each line can be looked up in CUDA's manual. Without a GPU a
demo says what would be seen, and shows the figures below; the barriers of Triton and two of the three graphs are shown
without one, too. A new one is a file with a `Demo` record beside its kernels in a `.cu`, a line in `DEMOS`, and
`python -m sublight.extensions.ledger`, which compiles it for three GPUs.
"""


def main(words: Sequence[str]) -> int:
    if len(words) != 1:
        print("use: python -m sublight.report.demo FOLDER", file=sys.stderr)
        return 2
    folder, record = Path(words[0]), read_record()
    write_file(docs_page(record), folder / "demos.md")
    for name, timeline in pictures(record) if record else ():
        write_file(lanes.svg(timeline.title, timeline.spans), folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
