"""The known models, a line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.predict import config
from sublight.predict.step import Precision
from sublight.report.draw.tables import plain
from sublight.report.predict import data, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType


def to_json() -> list[dict[str, Any]]:
    return [data.of_model(config.load(name), Precision()) for name in config.known_names()]


def page(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    names = ["model", "kind", "parameters", "active", "layers", "cache a token"]
    table = plain(names, right=names[2:])
    for row in rows:
        parameters, active = (terminal.billions(row[name]) for name in ("parameters", "active_parameters"))
        cache = units.text(row["cache_bytes_per_token"] or None, "B")
        table.add_row(row["name"], row["family"], parameters, active, str(row["layers"]), cache)
    note = "sublight predict MODEL --gpu h100: what one does there. Any other model: its config.json."
    return Group(table, Text(""), Text(note, style="dim"))
