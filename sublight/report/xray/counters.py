"""What Nsight Compute counted, kernel by kernel, and beside it what xray had predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.report.draw.tables import Fitting, note, plain
from sublight.xray.counters.measure import Compared, compare, counters_of
from sublight.xray.counters.record import Counters
from sublight.xray.examine import Page

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_STALLS = 3


def to_json(rows: Sequence[Counters]) -> dict[str, Any]:
    return {"counters": [row.to_json() for row in rows]}


def page(rows: Sequence[Counters]) -> RenderableType:
    """A row for each launch; where the terminal is narrow, columns are left out."""
    right = ("time", "occupancy", "SM", "memory", "sectors/load", "/store", "conflict")
    tables = []
    for left_out in ((), ("conflict",), ("conflict", "sectors/load", "/store")):
        heads = [name for name in right if name not in left_out]
        out = plain(("kernel", *heads, "warps wait for"), right=right, fold=("warps wait for",))
        for row in rows:
            cells = _cells(row)
            out.add_row(note(row.name, ""), *(cells[name] for name in heads), note(_waits(row)))
        tables.append(out)
    return Fitting(tuple(tables))


def _cells(row: Counters) -> dict[str, str]:
    return {
        "time": "" if row.duration_s is None else units.text(row.duration_s, "s"),
        "occupancy": _percent(row.occupancy),
        "SM": _percent(row.sm_throughput),
        "memory": _percent(row.memory_throughput),
        "sectors/load": _number(row.sectors_per_load),
        "/store": _number(row.sectors_per_store),
        "conflict": _number(row.shared_conflict),
    }


def _waits(row: Counters) -> str:
    stalls = sorted(((share, name) for name, share in row.stalls.items() if name != "selected"), reverse=True)
    return ", ".join(f"{name} {units.percent(share)}" for share, name in stalls[:MOST_STALLS])


def compared(pages: Sequence[Page], rows: Sequence[Counters]) -> list[tuple[Page, list[Compared]]]:
    """Predicted against counted, for the kernels that the report has."""
    pairs = ((page, counters_of(page.code, rows)) for page in pages)
    return [(page, compare(page.accesses, counted)) for page, counted in pairs if counted]


def rows_of(pairs: Sequence[tuple[Page, list[Compared]]]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "kernel": page.code.name,
            "gpu": page.code.gpu.key,
            "what": row.what,
            "unit": row.unit,
            "predicted": row.predicted,
            "counted": row.counted,
            "note": row.note or None,
        }
        for page, compared in pairs
        for row in compared
    ]


def against(
    pairs: Sequence[tuple[Page, list[Compared]]], pages: Sequence[Page], counters: Sequence[Counters]
) -> RenderableType:
    """Below the pages; where the report has none of the kernels, which it has."""
    from rich.console import Group
    from rich.text import Text

    if not any(compared for _, compared in pairs):
        names = ", ".join(dict.fromkeys(page.code.name for page in pages))
        has = ", ".join(dict.fromkeys(row.name for row in counters))
        why = f"the report has nothing to compare with {names}: it has {has}"
        return Group(Text(""), Text(why, style="bold"))
    right = ("predicted", "counted", "difference")
    out = plain(("kernel", "access", *right, ""), right=right, fold=("kernel", ""))
    several = len({page.code.gpu.key for page, _ in pairs}) > 1
    for page, compared in pairs:
        for row in compared:
            apart = "" if row.difference is None else f"{100 * row.difference:+.1f} %"
            name = f"{page.code.name} {page.code.gpu.key}" if several else page.code.name
            cells = (f"{row.what}, {row.unit}", _number(row.predicted), _number(row.counted))
            out.add_row(note(name, ""), *cells, _marked(apart, is_bad=row.is_close is False), note(row.note))
    return Group(Text(""), out)


def _marked(words: str, *, is_bad: bool) -> str:
    return f"[bold red]{words}[/]" if is_bad else words


def _percent(value: float | None) -> str:
    return "" if value is None else units.percent(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
