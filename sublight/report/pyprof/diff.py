"""Two Python profiles in the terminal: what changed, most first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublight import units
from sublight.pyprof.compare import Change, Comparison
from sublight.report.draw.tables import plain, titled
from sublight.report.pyprof.names import file_text
from sublight.report.pyprof.terminal import NARROW, cut, escape

if TYPE_CHECKING:
    from rich.console import RenderableType

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
        same = "no function's own time changed by more than 0.2 % of the run" if times else "every count is as it was"
        return Group(Text(head, style="bold"), Text(same))
    traced = before.mode != "sample"
    figures = (*(("change", "before", "after") if times else ()), *(("calls",) if traced else ()))
    out = plain((*figures, "function", "where"), right=figures)
    for one in rows:
        sign = "+" if one.change_s > 0 else "−" if one.change_s < 0 else ""
        style = "red" if one.change_s > 0 else "green" if one.change_s < 0 else ""
        change = f"{sign}{units.text(abs(one.change_s), 's')}"
        calls = (f"{one.calls_before:,} → {one.calls_after:,}",) if traced else ()
        where = cut(file_text(one.file), NARROW) if one.file else "builtin"
        colored = f"[{style}]{change}[/]" if style else change
        seconds = (colored, units.text(one.before_s, "s"), units.text(one.after_s, "s")) if times else ()
        out.add_row(
            *seconds,
            *calls,
            escape(cut(one.function, NARROW)),
            escape(where),
        )
    title = "Functions, by the change of their own time" if times else "Functions, whose calls changed"
    return Group(Text(head, style="bold"), Text(""), titled(title, out))


def is_worth_a_line(one: Change, comparison: Comparison) -> bool:
    least_s = LEAST_SHARE * max(comparison.before.wall_s, comparison.after.wall_s)
    return abs(one.change_s) > least_s or (comparison.before.mode != "sample" and one.calls_before != one.calls_after)
