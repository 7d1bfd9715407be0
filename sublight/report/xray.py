"""A kernel's page in the terminal: its resources GPU by GPU, what it issues and moves, what holds it back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.report.tables import note, plain
from sublight.report.xray_view import KernelView, MixRow, OccupancyRow, RoofRow
from sublight.xray.examine import Page
from sublight.xray.record import Access, Finding
from sublight.xray.sass.mix import Region

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MOST_KINDS = 6  # of instructions, named in the row of a loop
MOST_ACCESSES = 24
WORTH_MARKING = 1.25  # times the ideal
QUIET = ("nop", "move", "uniform", "control", "constant load", "other")


def to_json(pages: Sequence[Page]) -> dict[str, Any]:
    return {"kernels": [page.to_json() for page in pages]}


def page(pages: Sequence[Page]) -> RenderableType:
    """All kernels; one that was compiled for several GPUs has a column for each."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for group in grouped(pages):
        parts += [*_kernel(group), Text("")]
    return Group(*parts[:-1])


def grouped(pages: Sequence[Page]) -> list[list[Page]]:
    """One kernel's pages for several GPUs together, in the order in which they came."""
    groups: list[list[Page]] = []
    for each in pages:
        code = each.code
        for group in groups:
            of_group = group[0].code
            is_same = (code.name, code.file, code.signature) == (of_group.name, of_group.file, of_group.signature)
            if is_same and code.gpu.key not in {other.code.gpu.key for other in group}:
                group.append(each)
                break
        else:
            groups.append([each])
    return groups


def _kernel(group: Sequence[Page]) -> Iterator[RenderableType]:
    from rich.text import Text

    code = group[0].code
    at = f"  {Path(code.file).name}" if code.file else ""
    yield Text.assemble((code.name, "bold"), (at, "dim"))
    for words in _specialised(group):
        yield note(f"  {words}")
    yield Text("")
    yield resources(group)
    for each in group:
        several = f"{each.code.gpu.key}: " if len(group) > 1 else ""
        for sentence in sentences(each):
            yield Text(f"  {several}{sentence}")
    yield Text("")
    first = group[0]
    yield _mix(first)
    if first.accesses:
        yield Text("")
        yield _accesses(first.accesses)
    yield Text("")
    yield from _findings(group)
    for words in dict.fromkeys(words for each in group for words in each.notes):
        yield Text(f"  note: {words}", style="dim")


def _specialised(group: Sequence[Page]) -> Iterator[str]:
    """Constants and options; with the GPUs that have them, where they differ."""
    said: dict[str, list[str]] = {}
    for each in group:
        given = {**each.code.constants, **each.code.options}
        words = " ".join(f"{name}={value}" for name, value in given.items())
        said.setdefault(words, []).append(each.code.gpu.key)
    for words, keys in said.items():
        if words:
            yield words if len(said) == 1 else f"{', '.join(keys)}: {words}"


def resources(group: Sequence[Page]) -> Table:
    """What a block takes and how many an SM holds, a column for each GPU."""
    keys = [each.code.gpu.key for each in group]
    out = plain(("", *keys), right=keys)
    rows = [facts(each) for each in group]
    for name in rows[0]:
        out.add_row(name, *(row[name] for row in rows))
    return out


def facts(page: Page) -> dict[str, str]:
    """The figures of a kernel, by what people call them."""
    used, found = page.code.resources, page.occupancy
    kept = {
        "registers a thread": str(used.registers),
        "spilled": units.text(used.spill_bytes, "B") if used.spill_bytes else "none",
        "shared memory a block": units.text(used.shared_bytes, "B") if used.shared_bytes else "none",
        "threads a block": str(used.threads) if used.threads else "?",
        "tensor cores": page.mix.tensor_core or "not used",
    }
    if found:
        kept["blocks an SM"] = str(found.blocks_per_sm)
        kept["occupancy"] = f"{units.percent(found.fraction)} ({found.warps_per_sm} of {found.max_warps_per_sm} warps)"
        kept["limited by"] = ", ".join(found.limited_by)
    return kept


def sentences(page: Page) -> Iterator[str]:
    """What the figures mean."""
    if page.occupancy and page.occupancy.reason:
        yield f"not even one block fits: {page.occupancy.reason}"
    if page.in_flight:
        yield page.in_flight.sentence
    if page.what_if and not (page.in_flight and page.in_flight.verdict == "enough"):
        yield page.what_if.sentence
    if page.waves:
        yield page.waves.sentence
    if page.roof.sentence:
        yield page.roof.sentence


def _mix(page: Page) -> Table:
    right = ("instructions", "clocks")
    out = plain(("instructions by loop", *right, "waits for", "what they are"), right=right)
    for region in regions(page):
        kinds = sorted(region.counts.items(), key=lambda item: -item[1])
        named = [f"{count} {kind}" for kind, count in kinds if kind not in QUIET][:MOST_KINDS]
        clocks = f"{region.clocks_per_turn:,.0f}"
        out.add_row(region_name(region), f"{region.instructions:,}", clocks, region.limit or "", note(", ".join(named)))
    return out


def regions(page: Page) -> list[Region]:
    return [page.mix.outside, *page.mix.loops]


def region_name(region: Region) -> str:
    if not region.depth:
        return "outside loops"
    indent = "  " * (region.depth - 1)
    return f"{indent}loop at line {region.place.line}" if region.place else f"{indent}loop"


def _accesses(accesses: Iterable[Access]) -> Table:
    """By line and kind: several instructions of one line are one row."""
    right = ("line", "bytes", "requests", "sectors", "ideal", "bank conflict")
    out = plain(("line", "memory access", *right[1:], "not known"), right=right)
    rows = list(joined(accesses))
    if all(not row.unknown for row in rows):
        out.columns.pop()
    for row in rows[:MOST_ACCESSES]:
        per, conflict = row.sectors_per_request, row.bank_conflict
        ideal = row.ideal_sectors / row.requests if per is not None and row.requests else None
        cells = [
            str(row.place.line) if row.place else "",
            f"{row.space} {row.kind}",
            str(row.bytes_per_thread),
            f"{row.requests:,}" if row.requests else "",
            "" if per is None else _marked(f"{per:.3g}", is_bad=ideal is not None and per > WORTH_MARKING * ideal),
            "" if ideal is None else f"{ideal:.3g}",
            ""
            if conflict is None
            else "none"
            if conflict == 1
            else _marked(f"{conflict:.3g}-way", is_bad=conflict > 1.25),
        ]
        out.add_row(*cells, *([note(row.unknown)] if len(out.columns) > len(cells) else []))
    if len(rows) > MOST_ACCESSES:
        out.add_row("", f"{len(rows) - MOST_ACCESSES} more: --json has them all")
    return out


def _conflict(ways: float) -> str:
    return "none" if ways == 1 else _marked(f"{ways:.3g}-way", is_bad=ways > WORTH_MARKING)


def joined(accesses: Iterable[Access]) -> Iterator[Access]:
    """One for each line, kind, width and reason."""
    import dataclasses

    def key(access: Access) -> tuple[Any, ...]:
        place = (access.place.file, access.place.line) if access.place else ("", 0)
        return (access.space, *place, access.kind, access.bytes_per_thread, access.unknown)

    counts = ("requests", "sectors", "ideal_sectors", "wavefronts", "ideal_wavefronts")
    for _, group in itertools.groupby(sorted(accesses, key=key), key):
        same = list(group)
        yield dataclasses.replace(same[0], **{name: sum(getattr(each, name) for each in same) for name in counts})


def _marked(words: str, *, is_bad: bool) -> str:
    return f"[bold red]{words}[/]" if is_bad else words


def _findings(group: Sequence[Page]) -> Iterator[RenderableType]:
    """Each once, with the GPUs that it is true of where not of all."""
    from rich.text import Text

    held: dict[tuple[str, int, str], tuple[Finding, list[str]]] = {}
    for each in group:
        for finding in each.findings:
            key = (finding.id, finding.place.line if finding.place else 0, finding.detail)
            held.setdefault(key, (finding, []))[1].append(each.code.gpu.key)
    if not held:
        yield Text("  nothing to mend in the code", style="green")
    for finding, gpus in held.values():
        style = "dim" if finding.is_information else "bold red"
        only = f" ({', '.join(gpus)})" if len(gpus) < len(group) else ""
        yield Text.assemble(("  " + finding.id, style), f"  {where(finding)}{finding.detail}{only}")


def where(finding: Finding) -> str:
    return f"{Path(finding.place.file).name}:{finding.place.line}  " if finding.place else ""


def view(page: Page) -> KernelView:
    """The same for the HTML page."""
    found = page.occupancy
    return KernelView(
        code=page.code,
        blocks_per_sm=found.blocks_per_sm if found else None,
        occupancy=found.fraction if found else None,
        limited_by=", ".join(found.limited_by) if found else "",
        tensor_core=page.mix.tensor_core or "",
        findings=page.findings,
        accesses=tuple(joined(page.accesses)),
        occupancy_rows=tuple(
            OccupancyRow(
                warps=row.num_warps,
                blocks_per_sm=row.occupancy.blocks_per_sm,
                occupancy=row.occupancy.fraction,
                limited_by=", ".join(row.occupancy.limited_by),
                is_now=row.is_compiled,
                is_best=row.is_best,
            )
            for row in page.table
        ),
        mix=tuple(
            MixRow(
                name=region_name(region),
                counts={str(kind): count for kind, count in region.counts.items()},
                place=region.place,
                depth=region.depth,
                issue_cycles=region.clocks_per_turn,
                note=f"waits for {region.limit}" if region.limit else "",
            )
            for region in regions(page)
        ),
        roof=tuple(
            RoofRow(name=bound.name, seconds=bound.seconds, kind=bound.kind, detail=bound.detail)
            for bound in page.roof.bounds
        ),
        heat=page.heat,
        notes=(*sentences(page), *page.notes),
    )
