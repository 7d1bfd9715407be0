"""What --calibrate measured, and how far its predictions are off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sublight.report.draw.tables import plain, titled

if TYPE_CHECKING:
    from rich.console import RenderableType


def page(document: Mapping[str, Any], path: str) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    gpu = document["gpu"]
    table = plain(["kind", "rows", "median", "90 %", "roofline"], right=["rows", "median", "90 %", "roofline"])
    for check in document["checks"]:
        middle, most = (f"{100 * share:.1f} %" for share in check["table"])
        table.add_row(check["kind"], str(check["rows"]), middle, most, f"{100 * check['roofline'][0]:.0f} %")
    missing = [Text(f"! too few rows of {kind}: predicted as before", style="yellow") for kind in document["missing"]]
    measured = f"{document['rows']} ops of {gpu['name']} were measured in {document['seconds']:.0f} s."
    return Group(
        Text(f"{measured} Predict with --gpu {path}", style="bold"),
        *missing,
        Text(""),
        titled("off by, on the half of the rows that was held out", table),
    )
