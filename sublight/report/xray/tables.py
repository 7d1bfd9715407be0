"""What stands below the panes: occupancy, instructions by loop, memory accesses, the roof; and what the words mean."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import PurePath

from sublight import units
from sublight.report.xray.view import KernelView, MixRow, OccupancyRow, RoofRow
from sublight.xray.record import Access, Place

SECTOR_BYTES = 32
GOOD, POOR = 0.8, 0.5  # of the ideal
GROUPS = {  # of instructions: the name of their colour in the style sheet -> the kinds in it
    "tensor": ("tensor core", "tensor memory"),
    "global": ("global load", "global store", "global atomic", "async copy", "bulk copy"),
    "shared": ("shared load", "shared store", "shared atomic", "matrix load", "matrix store"),
    "local": ("local load", "local store"),
    "barrier": ("barrier",),
    "shuffle": ("shuffle",),
    "special": ("special function",),
    "float": ("fp64", "fp32", "fp16", "conversion"),
    "integer": ("integer", "logic"),
    "control": ("control",),
    "other": (),  # and whatever else
}
TERMS = {
    "warp": "32 threads that execute one instruction together. A block of 128 threads is 4 warps.",
    "register": "A thread's own 32-bit storage. An SM has 65,536 of them for all threads on it: the more one thread "
    "takes, the fewer threads fit.",
    "spill": "A value that found no register and lives in local memory instead: a store where it is made, a load where "
    "it is used, both slow.",
    "shared memory": "Fast memory on the SM that a block's threads share. What one block takes, another cannot have.",
    "occupancy": "Warps that an SM holds, against those that it could. While one waits for memory another can run. "
    "More is not always faster: enough bytes in flight is what counts.",
    "SM": "A streaming multiprocessor: the part of the GPU that runs blocks. An H200 has 132.",
    "tensor core": "The unit that multiplies small matrices. HMMA, HGMMA, UTCHMMA and their like run there; a product "
    "that is made of FFMA does not, and is many times slower.",
    "wave": "As many blocks as all SMs hold at once. A grid of 2.1 waves takes about as long as one of 3: the last is "
    "nearly empty (the tail).",
    "issue": "Each of an SM's four schedulers starts at most one instruction of a warp in a cycle. Where all slots are "
    "taken, neither memory nor tensor cores are the limit: the count of instructions is.",
    "request": "One memory instruction of one warp: up to 32 addresses at once.",
    "sector": "32 bytes that lie side by side: the least that global memory and L2 hand out. A warp that reads 4 bytes "
    "a thread, all neighbours, takes 4 sectors; spread out it takes up to 32.",
    "bank": "Shared memory is 32 banks, each 4 bytes wide. Lanes that want different words of one bank wait for each "
    "other: an n-way conflict.",
    "wavefront": "One pass of shared memory. A request takes as many as its worst bank has words to give.",
    "floor": "The least time that the data and the arithmetic take on this GPU: nothing that does the same is faster.",
}


def terms(*names: str) -> str:
    """Words that a learner meets here first; each opens to what it means."""
    items = "".join(
        f'<details class="term"><summary>{escape(name)}</summary><p>{escape(TERMS[name])}</p></details>'
        for name in names
    )
    return f'<div class="terms" aria-label="Terms">{items}</div>'


def line_link(place: Place | None, kernel: int) -> str:
    """A place; the script shows it in the panes.

    >>> line_link(Place(file="ops/add.py", line=7), 0)
    '<a href="#panes-0" data-line="7" title="ops/add.py">add.py:7</a>'
    """
    if place is None:
        return "–"
    name = f"{PurePath(place.file).name}:{place.line}"
    return f'<a href="#panes-{kernel}" data-line="{place.line}" title="{escape(place.file)}">{escape(name)}</a>'


def sections(view: KernelView, kernel: int) -> str:
    """All that there is something for."""
    made = (
        ("roof", "Where the time goes", _roof(view.roof), ("floor", "issue")),
        ("mix", "Instructions by loop", _mix(view.mix, kernel), ("tensor core",)),
        ("occupancy", "Occupancy by block size", _occupancy(view.occupancy_rows), ("SM", "wave")),
        ("accesses", "Memory accesses", _accesses(view.accesses, kernel), ("request", "sector", "bank", "wavefront")),
    )
    return "".join(
        f'<section id="{name}-{kernel}" class="part {name}" tabindex="-1"><h2>{title}</h2>'
        f"{terms(*words)}{body}</section>"
        for name, title, body, words in made
        if body
    )


def _table(headings: Sequence[tuple[str, str]], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Cells are markup; a heading is its side and its words."""
    head = "".join(f'<th scope="col" class="{side}">{escape(words)}</th>' for side, words in headings)
    body = "".join(
        f'<tr class="{kind}">'
        + "".join(f'<td class="{side}">{cell}</td>' for (side, _), cell in zip(headings, cells, strict=True))
        + "</tr>"
        for kind, cells in rows
    )
    return f'<div class="wide tall"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _meter(share: float, kind: str = "") -> str:
    return f'<span class="of {kind}"><i style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></i></span>'


def _occupancy(rows: Sequence[OccupancyRow]) -> str:
    if not rows:
        return ""
    headings = [("r", "warps"), ("r", "threads"), ("r", "blocks / SM"), ("", "occupancy"), ("", "limited by")]
    lines, all_best = [], all(row.is_best for row in rows)
    for row in rows:
        marks = "".join(
            f'<mark class="{kind}">{words}</mark>'
            for kind, words, is_so in (("fine", "best", row.is_best and not all_best), ("told", "now", row.is_now))
            if is_so
        )
        cells = (
            str(row.warps), str(32 * row.warps), str(row.blocks_per_sm),
            f"{_meter(row.occupancy)}{units.percent(row.occupancy)} {marks}", escape(row.limited_by),
        )  # fmt: skip
        lines.append(("now" * row.is_now, cells))
    as_is = "If registers and shared memory stay as they are; compiling for another size may change both."
    return f'{_table(headings, lines)}<p class="small">{as_is}</p>'


def group_of(kind: str) -> str:
    """
    >>> group_of("async copy"), group_of("fp16"), group_of("tensor"), group_of("never heard of")
    ('global', 'float', 'tensor', 'other')
    """
    return next((group for group, kinds in GROUPS.items() if kind in kinds or kind == group), "other")


def _grouped(row: MixRow) -> dict[str, dict[str, float]]:
    """Group -> its kinds and their counts, in the order of the groups."""
    return {
        group: kinds
        for group in GROUPS
        if (kinds := {kind: count for kind, count in row.counts.items() if count > 0 and group_of(kind) == group})
    }


def _mix(rows: Sequence[MixRow], kernel: int) -> str:
    if not rows:
        return ""
    used = {group for row in rows for group in _grouped(row)}
    legend = "".join(f'<li><i class="k-{group}"></i>{group}</li>' for group in GROUPS if group in used)
    most = max(sum(row.counts.values()) for row in rows) or 1.0
    bars = "".join(_loop(row, most, kernel) for row in rows)
    return f'<ul class="legend">{legend}</ul><div class="loops">{bars}</div>'


def _loop(row: MixRow, most: float, kernel: int) -> str:
    total = sum(row.counts.values())
    parts = []
    for group, kinds in _grouped(row).items():
        count = sum(kinds.values())
        tip = f"{group}: {count:g} of {total:g}" + "".join(f"\n{number:g} {kind}" for kind, number in kinds.items())
        parts.append(
            f'<span class="k-{group}" style="flex-grow:{count:g}" data-tip="{escape(tip)}"><em>{count:g}</em></span>'
        )
    issue = f"issues in ≥ {row.issue_cycles:.4g} cycles" if row.issue_cycles is not None else ""
    detail = " · ".join(filter(None, (f"{total:g} instructions a warp", issue, row.note)))
    name = f"{escape(row.name)} {line_link(row.place, kernel)}" if row.place else escape(row.name)
    return (
        f'<div class="loop" style="--d:{row.depth}"><div class="name">{name}<small>{escape(detail)}</small></div>'
        f'<div class="stack" style="width:{max(100 * total / most, 1.5):.2f}%">{"".join(parts)}</div></div>'
    )


def _share(access: Access) -> float | None:
    """Ideal against what is done; None where nothing can be said."""
    if access.space == "global":
        return access.ideal_sectors / access.sectors if access.sectors else None
    return 1 / access.bank_conflict if access.bank_conflict else None


def _accesses(rows: Sequence[Access], kernel: int) -> str:
    if not rows:
        return ""
    headings = [("", "line"), ("", "access"), ("r", "B a thread"), ("r", "requests"), ("r", "sectors a request")]
    headings += [("r", "ideal"), ("r", "bank conflict"), ("r", "moved"), ("r", "ideal"), ("", "of ideal"), ("note", "")]
    lines = []
    for row in rows:
        share = _share(row)
        is_global = row.space == "global" and not row.unknown and row.requests > 0
        kind = "" if share is None else "fine" if share >= GOOD else "poor" if share >= POOR else "wrong"
        conflict = row.bank_conflict
        way = "–" if conflict is None else "none" if conflict <= 1 else f"{conflict:.3g}-way"
        cells = (
            line_link(row.place, kernel),
            f'<span class="o-{row.space}">{row.space}</span> {row.kind}',
            str(row.bytes_per_thread),
            f"{row.requests:,}" if row.requests else "–",
            f'<span class="{kind}">{row.sectors / row.requests:.3g}</span>' if is_global else "–",
            f"{row.ideal_sectors / row.requests:.3g}" if is_global else "–",
            f'<span class="{kind}">{way}</span>' if conflict is not None else "–",
            units.text(SECTOR_BYTES * row.sectors, "B") if is_global else "–",
            units.text(SECTOR_BYTES * row.ideal_sectors, "B") if is_global else "–",
            f"{_meter(share, kind)}{units.percent(share)}" if share is not None else "–",
            escape(row.unknown) or f"<code>{escape(row.instruction)}</code>",
        )
        lines.append((kind, cells))
    of_what = "Requests and bytes are of the blocks that were followed, not of the whole launch."
    return f'{_table(headings, lines)}<p class="small">{of_what}</p>'


def _roof(rows: Sequence[RoofRow]) -> str:
    known = [row.seconds for row in rows if row.seconds]
    if not known:
        return ""
    longest = max(known)
    floor = next((row.seconds for row in rows if row.kind == "floor" and row.seconds), None)
    bars = []
    for row in rows:
        if row.seconds is None:
            bar = '<span class="none">not known</span>'
        else:
            against = f" · {row.seconds / floor:.2f} × floor" if floor and row.kind != "floor" else ""
            bar = (
                f'<span class="bar-of {row.kind}" style="width:{max(100 * row.seconds / longest, 0.5):.2f}%"></span>'
                f"<b>{escape(units.text(row.seconds, 's'))}</b><small>{against}</small>"
            )
        detail = f"<small>{escape(row.detail)}</small>" if row.detail else ""
        bars.append(f"<dt>{escape(row.name)}</dt><dd><div>{bar}</div>{detail}</dd>")
    return f'<dl class="bars">{"".join(bars)}</dl>'
