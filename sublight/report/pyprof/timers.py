"""The clocks of this machine in the terminal, and the mistakes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublight import units
from sublight.pyprof.timers import Clocks, Mistake
from sublight.report.draw.tables import plain, titled, wrapped

if TYPE_CHECKING:
    from rich.console import RenderableType


def page(clocks: Clocks) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    names = ("clock", "a reading", "smallest step", "measures")
    out = plain(names, right=("a reading", "smallest step"))
    out.columns[-1].no_wrap = False
    for timer in clocks.timers:
        measures = f"{timer.measures}. For {timer.use}." if not timer.reason else f"{timer.measures} ({timer.reason})"
        out.add_row(timer.name, units.text(timer.cost_s, "s"), units.text(timer.step_s, "s"), wrapped(measures))
    title = f"Clocks of this machine{f' and its {clocks.device}' if clocks.device else ''}"
    parts: list[RenderableType] = [titled(title, out), Text(""), Text("Mistakes, made here on purpose", style="bold")]
    for mistake in clocks.mistakes:
        parts += [Text(""), *_mistake(mistake)]
    return Group(*parts)


def _mistake(mistake: Mistake) -> list[RenderableType]:
    from rich.text import Text

    head = Text(f"{mistake.title[:1].upper()}{mistake.title[1:]}")
    if mistake.reason:
        return [head, _inside(f"{mistake.wrong}: {mistake.reason}"), _inside(mistake.why)]
    wide = max(len(mistake.wrong), len(mistake.right))
    lines = [
        Text(f"  {name.ljust(wide)}  {units.text(seconds, 's'):>9}  {verdict}", style=style)
        for name, seconds, verdict, style in (
            (mistake.wrong, mistake.wrong_s, "wrong", "red"),
            (mistake.right, mistake.right_s, "right", "green"),
        )
    ]
    return [head, *lines, _inside(mistake.why)]


def _inside(words: str) -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(words, style="dim"), (0, 0, 0, 2))
