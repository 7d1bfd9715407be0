"""The doctor's checks as a table: what is here, what is missing, and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sublight.doctor.record import Check, State
from sublight.report.draw.tables import note, plain, wrapped

if TYPE_CHECKING:
    from rich.console import RenderableType

MARKS: dict[State, str] = {"ok": "[green]ok[/]", "missing": "[dim]missing[/]", "broken": "[bold red]broken[/]"}


def page(checks: Sequence[Check]) -> RenderableType:
    """A table of all checks, then a table with one fix a line."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    out = plain(("", "state", "found", "for"), fold=("found", "for"))
    for check in checks:
        out.add_row(escape(check.name), MARKS[check.state], note(check.found or "–", ""), wrapped(check.needed_for))
    fixes = plain(("to get", "do"), fold=("do",))
    for check in checks:
        if check.fix:
            fixes.add_row(check.name, wrapped(check.fix, "bold" if check.state == "broken" else ""))
    return Group(out, Text(""), fixes) if any(check.fix for check in checks) else out


def to_json(checks: Sequence[Check]) -> dict[str, Any]:
    return {"checks": [dataclasses.asdict(check) for check in checks]}
