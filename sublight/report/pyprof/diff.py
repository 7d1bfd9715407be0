"""Two Python profiles in the terminal: what changed, most first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sublight import units
from sublight.pyprof.compare import Change, Comparison
from sublight.report.draw.tables import Fitting, plain, titled
from sublight.report.pyprof.names import file_text
from sublight.report.pyprof.terminal import NARROW, cut, escape

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

LEAST_SHARE = 0.002  # changes below this share of the longer run are not listed


def page(comparison: Comparison, *, most: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    before, after = comparison.before, comparison.after
    head = f"{units.text(before.wall_s, 's')} before, {units.text(after.wall_s, 's')} after"
    if before.command != after.command:
        head += f" ({before.command} → {after.command})"
    rows = [one for one in comparison.changes if is_worth_a_line(one, comparison)][:most]
    times = before.mode != "counts"
    if not rows:
        same = "no function's time changed by more than 0.2 % of the run" if times else "every count is as it was"
        return Group(Text(head, style="bold"), Text(same))
    title = "Functions whose calls changed"
    if times:
        title = "Functions, by the change of their own time; total: with what they call"
    names = (
        *(("change", "before", "after", "total") if times else ()),
        *(("calls",) if before.mode != "sample" else ()),
        *("function", "where"),
    )
    narrow = tuple(name for name in names if name not in ("before", "where"))
    tables = tuple(_table(rows, columns) for columns in (names, narrow))
    return Group(Text(head, style="bold"), Text(""), titled(title, Fitting(tables)))


def _table(rows: Sequence[Change], columns: tuple[str, ...]) -> Table:
    out = plain(columns, right=("change", "before", "after", "total", "calls"))
    for one in rows:
        cells = {
            "change": _signed(one.change_s),
            "before": units.text(one.before_s, "s"),
            "after": units.text(one.after_s, "s"),
            "total": _signed(one.total_change_s),
            "calls": f"{one.calls_before:,} → {one.calls_after:,}",
            "function": escape(cut(one.function, NARROW)),
            "where": escape(cut(file_text(one.file), NARROW) if one.file else "builtin"),
        }
        out.add_row(*(cells[name] for name in columns))
    return out


def _signed(seconds: float) -> str:
    """
    >>> _signed(0.25), _signed(-0.25), _signed(0.0)
    ('[red]+250 ms[/]', '[green]−250 ms[/]', '0 s')
    """
    text = units.text(abs(seconds), "s")
    return f"[red]+{text}[/]" if seconds > 0 else f"[green]−{text}[/]" if seconds < 0 else text


def is_worth_a_line(one: Change, comparison: Comparison) -> bool:
    least_s = LEAST_SHARE * max(comparison.before.wall_s, comparison.after.wall_s)
    change_s = max(abs(one.change_s), abs(one.total_change_s))
    return change_s > least_s or (comparison.before.mode != "sample" and one.calls_before != one.calls_after)
