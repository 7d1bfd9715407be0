"""Many kernels at a glance: a row for each on each GPU, with the worst of its accesses and what is to be mended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sublight import units
from sublight.report.xray.causes import causes
from sublight.report.xray.facts import bytes_text, labels, over_ideal, same_kernels
from sublight.report.xray.view import KernelView

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

UNKNOWN = "–"
BAD_RATIO = 1.25  # of the ideal: from here on it is marked
HEADINGS = (
    *("GPU", "at", "regs", "spilled", "shared", "occupancy", "limited by", "tensor cores", "sectors", "conflict"),
    "to mend",
)  # fmt: skip
GIVE_WAY = ("limited by", "shared", "tensor cores")  # in this order, where the terminal is narrow
AT_LAST = ("conflict", "sectors")  # after the kernels' names are broken: `to mend` counts what is wrong with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel on one GPU: its cells by heading, and which of them to worry about."""

    at: int  # of the views that were given
    label: str
    cells: dict[str, str]
    bad: frozenset[str]


def rows(views: Sequence[KernelView]) -> list[Row]:
    """In the order of the kernels, the GPUs of each together."""
    codes = [view.code for view in views]
    names = labels(codes)
    return [_row(views[at], at, names[at]) for group in same_kernels(codes) for at in group]


def _row(view: KernelView, at: int, label: str) -> Row:
    used = view.code.resources
    ratio = max((each for each in map(over_ideal, view.accesses) if each is not None), default=None)
    conflict = max((each.bank_conflict for each in view.accesses if each.bank_conflict is not None), default=None)
    wrong = sum(not cause.lead.is_information for cause in causes(view.findings))
    cells = {
        "GPU": view.code.gpu.key,
        "at": view.code.at,
        "regs": str(used.registers),
        "spilled": f"{used.spill_bytes} B" if used.spill_bytes else "none",
        "shared": bytes_text(used.shared_bytes) if used.shared_bytes else "none",
        "occupancy": units.percent(view.occupancy),
        "limited by": view.limited_by or UNKNOWN,
        "tensor cores": view.tensor_core or ("none" if view.tensor_core is not None else UNKNOWN),
        "sectors": UNKNOWN if ratio is None else "ideal" if ratio < 1.005 else f"{ratio:.3g} ×",
        "conflict": UNKNOWN if conflict is None else "none" if conflict < 1.005 else f"{conflict:.3g}-way",
        "to mend": str(wrong) if wrong else "none" if view.is_whole else UNKNOWN,
    }
    bad = {"spilled": used.spill_bytes > 0, "sectors": (ratio or 1) > BAD_RATIO, "to mend": wrong > 0}
    bad["conflict"] = (conflict or 1) > BAD_RATIO
    return Row(at=at, label=label, cells=cells, bad=frozenset(name for name, is_bad in bad.items() if is_bad))


def shown(entries: Sequence[Row]) -> list[str]:
    """The headings that tell something: one GPU is named above the table, and unused tensor cores are no news."""
    silent = {"GPU"} if len({row.cells["GPU"] for row in entries}) == 1 else set()
    silent |= {"tensor cores"} if all(row.cells["tensor cores"] in ("none", UNKNOWN) for row in entries) else set()
    silent |= set() if any(row.cells["at"] for row in entries) else {"at"}
    return [name for name in HEADINGS if name not in silent]


def table(views: Sequence[KernelView]) -> RenderableType:
    """For the terminal; columns are left out where it is narrow."""
    from sublight.report.draw.tables import Fitting

    drawn = rows(views)
    names = shown(drawn)
    choices = [names]
    for name in (*GIVE_WAY, *AT_LAST):
        choices.append([each for each in choices[-1] if each != name])
    whole, broken = choices[: -len(AT_LAST)], choices[-len(AT_LAST) - 1 :]
    tables = [_drawn(drawn, chosen, fold=()) for chosen in whole]
    return Fitting((*tables, *(_drawn(drawn, chosen, fold=("kernel",)) for chosen in broken)))


def _drawn(entries: Sequence[Row], headings: Sequence[str], *, fold: Sequence[str]) -> Table:
    from sublight.report.draw.tables import plain

    right = [name for name in headings if name not in ("GPU", "at", "limited by", "tensor cores")]
    out = plain(("kernel", *headings), right=right, fold=fold)
    before = ""
    for row in entries:
        cells = (_marked(row.cells[name], is_bad=name in row.bad) for name in headings)
        out.add_row(_plain("" if row.label == before else row.label), *cells)
        before = row.label
    return out


def _plain(words: str) -> RenderableType:
    from rich.text import Text

    return Text(words)  # a kernel's name is no markup


def _marked(words: str, *, is_bad: bool) -> str:
    return f"[bold red]{words}[/]" if is_bad else words
