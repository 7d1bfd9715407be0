"""What `sublight.patch` did, as a table: what was swapped, how often, what it should save, what was left and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublight import units
from sublight.fix.patch.record import Patch, Row
from sublight.report.draw.tables import note, plain

if TYPE_CHECKING:
    from rich.console import RenderableType


def page(patch: Patch) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if patch.rows:
        out = plain(("", "module", "times", "saves a step", "why"), right=("times", "saves a step"))
        for row in sorted(patch.rows, key=lambda row: (not row.is_swapped, -(row.saving_s or 0.0))):
            state = Text("swapped", style="green") if row.is_swapped else Text("left", style="dim")
            out.add_row(state, row.kind, f"{len(row.names)} ×", _saving(row), note(row.reason))
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
    return f"{patch.swapped} modules swapped{total}; sublight.unpatch(model) undoes it"


def _saving(row: Row) -> str:
    return "" if row.saving_s is None else units.text(row.saving_s, "s")
