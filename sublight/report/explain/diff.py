"""Two explained runs side by side, for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from sublight import units
from sublight.diagnose.diff import Diff
from sublight.diagnose.record import BREAKDOWN
from sublight.report.draw.tables import note, plain
from sublight.report.explain.terminal import shortened

MOST_OPS = 15
_STYLE = {"faster": "green", "gone": "green", "slower": "red", "new": "red", "same": "dim"}


def page(found: Diff) -> RenderableType:
    """The step, its parts and the ops that moved."""
    step = found.step
    words = {"faster": "faster", "slower": "slower", "same": "unchanged within noise"}[step.verdict]
    ratio = step.before_s / step.after_s if step.after_s else 0.0
    times = f"{units.text(step.before_s, 's')} → {units.text(step.after_s, 's')}"
    speed = f" ({ratio:.2f}×)" if step.verdict != "same" else ""
    head = Text(f"{words}: the step went {times}{speed}", style=f"bold {_STYLE[step.verdict]}")
    floors = note(
        f"floors {units.text(found.before.floor_s, 's')} → {units.text(found.after.floor_s, 's')}; "
        f"changes below {units.percent(step.noise)} are noise"
    )
    parts = plain(("where the step goes", "before", "after", "change"), right=("before", "after", "change"))
    for name, (was, now) in found.parts.items():
        if max(was, now) > 0.005 * step.before_s:
            parts.add_row(BREAKDOWN[name], units.text(was, "s"), units.text(now, "s"), _signed(now - was))
    shown: list[RenderableType] = [head, floors, Text(""), parts]
    if found.ops:
        headings = ("op", "shape", "calls", "before", "after", "change", "")
        table = plain(headings, right=("calls", "before", "after", "change"))
        for op in found.ops[:MOST_OPS]:
            calls = f"{op.calls[0]:g} → {op.calls[1]:g}" if op.calls[0] != op.calls[1] else f"{op.calls[0]:g}"
            cells = (Text(shortened(op.name, 40)), Text(shortened(op.shape, 30)), calls)
            figures = (units.text(op.before_s, "s"), units.text(op.after_s, "s"), _signed(op.change_s))
            table.add_row(*cells, *figures, Text(op.verdict, style=_STYLE[op.verdict]))
        shown += [Text(""), table]
        if len(found.ops) > MOST_OPS:
            shown.append(note(f"and {len(found.ops) - MOST_OPS} more"))
    else:
        shown += [Text(""), note("no op moved beyond noise")]
    for label, names in (("fixed", found.fixed), ("new", found.new)):
        if names:
            shown.append(Text(f"{label}: {', '.join(names)}", style=_STYLE["faster" if label == "fixed" else "slower"]))
    return Group(*shown)


def _signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + units.text(abs(seconds), "s")
