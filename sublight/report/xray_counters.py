"""What Nsight Compute counted, kernel by kernel, and beside it what xray had predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.report.tables import note, plain
from sublight.xray.counters.measure import Compared, compare, counters_of
from sublight.xray.counters.record import Counters
from sublight.xray.examine import Page

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_STALLS = 3


def to_json(rows: Sequence[Counters]) -> dict[str, Any]:
    return {"counters": [row.to_json() for row in rows]}


def page(rows: Sequence[Counters]) -> RenderableType:
    """A row for each launch."""
    right = ("time", "occupancy", "SM", "memory", "sectors a load", "a store", "bank conflict")
    out = plain(("kernel", *right, "warps wait for"), right=right, fold=("kernel",))
    for row in rows:
        stalls = sorted(((share, name) for name, share in row.stalls.items() if name != "selected"), reverse=True)
        waits = ", ".join(f"{name} {units.percent(share)}" for share, name in stalls[:MOST_STALLS])
        out.add_row(
            note(row.name, ""),
            "" if row.duration_s is None else units.text(row.duration_s, "s"),
            *(_percent(value) for value in (row.occupancy, row.sm_throughput, row.memory_throughput)),
            *(_number(value) for value in (row.sectors_per_load, row.sectors_per_store, row.shared_conflict)),
            note(waits),
        )
    return out


def compared(pages: Sequence[Page], rows: Sequence[Counters]) -> list[tuple[Page, list[Compared]]]:
    """Predicted against counted, for the kernels that the report has."""
    found = ((page, counters_of(page.code, rows)) for page in pages)
    return [(page, compare(page.accesses, counted)) for page, counted in found if counted]


def against(pairs: Sequence[tuple[Page, list[Compared]]]) -> RenderableType:
    right = ("predicted", "counted", "difference")
    out = plain(("kernel", "access", *right, ""), right=right)
    for page, rows in pairs:
        for row in rows:
            apart = "" if row.difference is None else f"{100 * row.difference:+.1f} %"
            told = f"{row.what}, {row.unit}"
            out.add_row(page.code.name, told, _number(row.predicted), _number(row.counted), apart, note(row.note))
    return out


def _percent(value: float | None) -> str:
    return "" if value is None else units.percent(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
