"""What `sublight.quantize` or `sublight.sparsify` did, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublight import units
from sublight.fix.compressed import Compressed
from sublight.report.draw.tables import plain

if TYPE_CHECKING:
    from rich.console import RenderableType


def page(done: Compressed) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if done.rows:
        out = plain(
            ("", "times", "module", "before", "after", "why"),
            right=("times", "before", "after"),
            fold=("module", "why"),
        )
        for row in sorted(done.rows, key=lambda row: not row.is_changed):
            state = Text(done.verb, style="green") if row.is_changed else Text("left", style="dim")
            sizes = [units.text(size, "B") for size in (row.before_bytes, row.after_bytes)]
            out.add_row(state, f"{len(row.names)} ×", row.kind, *sizes, Text(row.reason, style="dim"))
        parts.append(out)
    parts.append(Text(sentence(done), style="bold"))
    if done.changed and done.expected:
        parts.append(Text(f"expected: {done.expected}"))
    return Group(*parts, *([Text(f"verified: {done.change}")] if done.change else []))


def sentence(done: Compressed) -> str:
    if not done.rows:
        return "no linear layer here: the model is as it was"
    if not done.changed:
        return f"nothing was {done.verb}: the model is as it was"
    sizes = f"{units.text(done.before_bytes, 'B')} of weights are {units.text(done.after_bytes, 'B')} now"
    undo = "sublight.unpatch(model) undoes it" if done.is_kept else "the weights as they were are gone (keep=False)"
    return f"{done.changed} layer{'s' * (done.changed > 1)} {done.verb}: {sizes}; {undo}"
