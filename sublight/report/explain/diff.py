"""Two explained runs side by side, for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sublight import units
from sublight.diagnose.diff import Diff
from sublight.diagnose.record import BREAKDOWN
from sublight.report.draw.tables import Fitting, note, plain
from sublight.report.explain.terminal import shortened

MOST_OPS = 15
_STYLE = {"faster": "green", "gone": "green", "slower": "red", "new": "red", "same": "dim"}


def page(diff: Diff) -> RenderableType:
    """The step, its parts and the ops that moved."""
    step = diff.step
    words = {"faster": "faster", "slower": "slower", "same": "unchanged within noise"}[step.verdict]
    ratio = step.before_s / step.after_s if step.after_s else 0.0
    times = f"{units.text(step.before_s, 's')} → {units.text(step.after_s, 's')}"
    speed = f" ({ratio:.2f}×)" if step.verdict != "same" else ""
    head = Text(f"{words}: the step went {times}{speed}", style=f"bold {_STYLE[step.verdict]}")
    floors = note(
        f"floors {units.text(diff.before.floor_s, 's')} → {units.text(diff.after.floor_s, 's')}; "
        f"changes below {units.percent(step.noise)} are noise"
    )
    parts = plain(("where the step goes", "before", "after", "change"), right=("before", "after", "change"))
    for name, (was, now) in diff.parts.items():
        if max(was, now) > 0.005 * step.before_s:
            parts.add_row(BREAKDOWN[name], units.text(was, "s"), units.text(now, "s"), _signed(now - was))
    doubts = [Text(f"! {doubt}", style="yellow") for doubt in diff.doubts]
    shown: list[RenderableType] = [head, *doubts, floors, Text(""), parts]
    if diff.ops:
        widths = ((40, 30), (32, 22), (22, 14), (24, 0), (14, 0))  # most of a name, of a shape; 0: none
        shown += [Text(""), Fitting(tuple(_ops(diff, *most) for most in widths))]
        if len(diff.ops) > MOST_OPS:
            shown.append(note(f"and {len(diff.ops) - MOST_OPS} more"))
    else:
        shown += [Text(""), note("no op moved beyond noise")]
    for label, names in (("fixed", diff.fixed), ("new", diff.new)):
        if names:
            shown.append(Text(f"{label}: {', '.join(names)}", style=_STYLE["faster" if label == "fixed" else "slower"]))
    return Group(*shown)


def _ops(diff: Diff, most_name: int, most_shape: int) -> Table:
    figures = ("calls", "before", "after", "change")
    table = plain(("op", *(["shape"] if most_shape else []), *figures, ""), right=figures)
    for op in diff.ops[:MOST_OPS]:
        shape = [Text(shortened(op.shape, most_shape))] if most_shape else []
        calls = f"{op.calls[0]:g} → {op.calls[1]:g}" if op.calls[0] != op.calls[1] else f"{op.calls[0]:g}"
        times = (units.text(op.before_s, "s"), units.text(op.after_s, "s"), _signed(op.change_s))
        verdict = Text(op.verdict, style=_STYLE[op.verdict])
        table.add_row(Text(shortened(op.name, most_name)), *shape, calls, *times, verdict)
    return table


def _signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + units.text(abs(seconds), "s")
