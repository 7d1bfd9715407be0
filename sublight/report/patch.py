"""What `sublight.patch` did, as a table: what was swapped, how often, what it should save, what was left and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublight import units
from sublight.fix.patch.record import Patch, Row
from sublight.report.draw.tables import plain

if TYPE_CHECKING:
    from rich.console import RenderableType


def page(patch: Patch) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if patch.rows:
        saves = any(row.saving_s is not None for row in patch.rows)
        headings = ("", "times", "module", *(("saves a step",) if saves else ()), "why")
        out = plain(headings, right=("times", "saves a step"), fold=("module", "why"))
        for column in out.columns:
            if column.no_wrap:  # short columns are never cut; module and reason are wrapped
                column.min_width = max(len(str(column.header)), len("swapped") if not column.header else 0)
        for row in sorted(patch.rows, key=lambda row: (not row.is_swapped, -(row.saving_s or 0.0))):
            state = Text("swapped", style="green") if row.is_swapped else Text("left", style="dim")
            saving = (_saving(row),) if saves else ()
            out.add_row(state, f"{len(row.names)} ×", row.kind, *saving, Text(row.reason, style="dim"))
        parts.append(out)
    parts.append(Text(sentence(patch), style="bold"))
    if patch.verdict:
        parts.append(Text(f"verified: {patch.verdict.sentence}"))
        parts += [Text(f"  not given by the patched model: {name}", style="dim") for name in patch.verdict.missing]
    if patch.paid:
        parts.append(Text(f"measured: {patch.paid.sentence}"))
    return Group(*parts, *(Text(f"note: {words}", style="dim") for words in patch.notes))


def sentence(patch: Patch) -> str:
    """The outcome in one line."""
    if patch.before and not patch.swapped:
        return f"patched already: {patch.before} modules, and no more to swap; sublight.unpatch(model) undoes it"
    if not patch.rows:
        return "nothing here that our ops do: the model is as it was"
    if not patch.swapped:
        reasons = {row.reason for row in patch.rows}
        why = f": {reasons.pop()}" if len(reasons) == 1 else ""
        return f"nothing was swapped{why}"
    savings = [row.saving_s for row in patch.rows if row.saving_s is not None]
    total = f", {units.text(sum(savings), 's')} less of the GPU's time a step expected" if savings else ""
    modules = len({name for row in patch.rows if row.is_swapped for name in row.names})
    return f"{modules} module{'s' * (modules != 1)} swapped{total}; sublight.unpatch(model) undoes it"


def _saving(row: Row) -> str:
    return "" if row.saving_s is None else units.text(row.saving_s, "s")
