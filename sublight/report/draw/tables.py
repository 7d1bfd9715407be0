"""The one look that all tables share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text
LEAST_NOTE = 12  # the narrowest column in which a note still says something


def note(words: str, style: str = "dim") -> Text:
    """The last cell of a row, which a narrow terminal cuts, so that the figures before it stay whole."""
    from rich.text import Text

    return Text(words, style=style, no_wrap=True, overflow="ellipsis")


def wrapped(words: str, style: str = "dim") -> Text:
    """The last cell of a row, wrapped into as many lines as it needs: a reason, or what to do."""
    from rich.text import Text

    return Text(words, style=style)


@dataclass(frozen=True, slots=True)
class Fitting:
    """Shows the first of these tables that fits the terminal, else the last: columns go before figures are cut."""

    choices: tuple[Table, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield next((table for table in self.choices if _needed(table) <= options.max_width), self.choices[-1])


def _needed(table: Table) -> int:
    """Columns that the table takes where only its notes are cut."""
    from rich.text import Text

    widths = []
    for column in table.columns:
        cells = [Text.from_markup(cell) if isinstance(cell, str) else cell for cell in (column.header, *column.cells)]
        whole = max(cell.cell_len for cell in cells if isinstance(cell, Text))
        widths.append(whole if column.no_wrap else min(whole, LEAST_NOTE))
    return sum(widths) + 2 * (len(widths) - 1)


def titled(title: str, *below: RenderableType) -> RenderableType:
    """A title that may be wider than its table."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), *below)


def plain(headings: Sequence[str], *, right: Collection[str] = (), fold: Collection[str] = ()) -> Table:
    """Two spaces between columns, a rule under the head, no wrapped cells; the columns of `fold` are narrowed first."""
    from rich import box
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in headings:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        out.add_column(name, justify=justify, no_wrap=name not in fold, overflow="fold" if name in fold else "ellipsis")
    return out
