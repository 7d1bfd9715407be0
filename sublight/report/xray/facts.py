"""What every page of `xray` says of a kernel, before anything is drawn: figures, sentences, rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from sublight import units
from sublight.report.xray.view import KernelView, MixRow, OccupancyRow, RoofRow
from sublight.xray.examine import Page
from sublight.xray.record import Access, Code, Finding
from sublight.xray.sass.mix import Region

NO_NEWS = {"num_ctas": 1}  # options that are not worth showing at this value


def bytes_text(count: int) -> str:
    """
    >>> bytes_text(0), bytes_text(512), bytes_text(65536), bytes_text(1536)
    ('0', '512 B', '64 KiB', '1.5 KiB')
    """
    return "0" if not count else f"{count} B" if count < 1024 else f"{count / 1024:.4g} KiB"


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "kernel"), counted(1200, "kernel")
    ('1 kernel', '1,200 kernels')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def grouped(pages: Sequence[Page]) -> list[list[Page]]:
    """One kernel's pages for several GPUs together, in the order in which they came."""
    return [[pages[at] for at in group] for group in same_kernels([page.code for page in pages])]


def same_kernels(codes: Sequence[Code]) -> list[list[int]]:
    """Where each kernel stands, one GPU after another; constants may differ, since a GPU has tiles of its own."""
    groups: list[list[int]] = []
    for at, code in enumerate(codes):
        for group in groups:
            first = codes[group[0]]
            is_same = (code.name, code.file, code.signature) == (first.name, first.file, first.signature)
            if is_same and code.gpu.key not in {codes[other].gpu.key for other in group}:
                group.append(at)
                break
        else:
            groups.append([at])
    return groups


def labels(codes: Sequence[Code]) -> list[str]:
    """Names, with the constants and types that tell two of one name on one GPU apart."""
    all_facts = [_facts_of(code) for code in codes]
    names = []
    for code, mine in zip(codes, all_facts, strict=True):
        twins = [
            other
            for each, other in zip(codes, all_facts, strict=True)
            if (each.name, each.gpu.key) == (code.name, code.gpu.key)
        ]
        apart = [f"{name}={value}" for name, value in mine.items() if any(other.get(name) != value for other in twins)]
        names.append(" ".join([code.name, *apart]))
    return names


def _facts_of(code: Code) -> dict[str, str]:
    return {name: str(value) for name, value in {**code.signature, **code.constants, **code.options}.items()}


def specialised(code: Code) -> str:
    """Constants, options and grid of the launch; of an op the shape of the call."""
    settings = {name: value for name, value in {**code.constants, **code.options}.items() if NO_NEWS.get(name) != value}
    words = [f"{name}={value}" for name, value in settings.items()]
    at = [f"at {code.at}:"] * bool(code.at)
    return " ".join([*at, *words, *[f"grid={'x'.join(map(str, code.grid))}"] * bool(code.grid)])


def facts(page: Page) -> dict[str, str]:
    """A kernel's figures by their usual names."""
    used, occupancy = page.code.resources, page.occupancy
    kept = {
        "registers a thread": str(used.registers),
        "spilled": f"{used.spill_bytes} B" if used.spill_bytes else "none",
        "shared memory a block": bytes_text(used.shared_bytes) if used.shared_bytes else "none",
        "barriers": str(used.barriers),
        "threads a block": str(used.threads) if used.threads else "?",
        "tensor cores": page.mix.tensor_core or "not used",
    }
    if used.stack_bytes != used.spill_bytes:
        kept["stack a thread"] = f"{used.stack_bytes} B"
    if occupancy:
        kept["blocks an SM"] = str(occupancy.blocks_per_sm)
        kept["warps an SM"] = f"{occupancy.warps_per_sm} of {occupancy.max_warps_per_sm}"
        kept["occupancy"] = units.percent(occupancy.fraction)
        kept["limited by"] = ", ".join(occupancy.limited_by)
    return kept


def sentences(page: Page) -> Iterator[tuple[str, str]]:
    """What the figures mean, each with its arithmetic where that is long."""
    if page.occupancy and page.occupancy.reason:
        yield f"not even one block fits: {page.occupancy.reason}", ""
    if page.in_flight:
        arithmetic = page.in_flight.arithmetic
        yield page.in_flight.sentence.removesuffix(f" ({arithmetic})"), arithmetic
    if page.what_if and not (page.in_flight and page.in_flight.verdict == "enough"):
        yield page.what_if.sentence, ""
    if page.waves:
        yield page.waves.sentence, ""
    if page.roof.sentence:
        yield page.roof.sentence, ""


def regions(page: Page) -> list[Region]:
    return [page.mix.outside, *page.mix.loops]


def region_name(region: Region) -> str:
    if not region.depth:
        return "outside loops"
    indent = "  " * (region.depth - 1)
    return f"{indent}loop at line {region.place.line}" if region.place else f"{indent}loop"


def joined(accesses: Iterable[Access]) -> Iterator[Access]:
    """Accesses joined into one row for each line, kind, width and reason."""

    def key(access: Access) -> tuple[Any, ...]:
        place = (access.place.file, access.place.line) if access.place else ("", 0)
        return (access.space, *place, access.kind, access.bytes_per_thread, access.unknown)

    counts = ("requests", "sectors", "ideal_sectors", "wavefronts", "ideal_wavefronts")
    for _, group in itertools.groupby(sorted(accesses, key=key), key):
        same = list(group)
        yield dataclasses.replace(same[0], **{name: sum(getattr(each, name) for each in same) for name in counts})


def over_ideal(access: Access) -> float | None:
    """Sectors over the ideal number; None where either is unknown."""
    if access.sectors_per_request is None or not access.ideal_sectors:
        return None
    return access.sectors / access.ideal_sectors


def where(finding: Finding) -> str:
    return f"{PurePath(finding.place.file).name}:{finding.place.line}" if finding.place else ""


def is_partly_seen(page: Page) -> bool:
    """Some of its addresses are not known, or none: a cubin alone does not tell them."""
    untold = any(bound.name == "transactions" and bound.seconds is None for bound in page.roof.bounds)
    return any(access.unknown for access in page.accesses) or (untold and not page.accesses)


def view(page: Page) -> KernelView:
    """The page as plain rows."""
    occupancy = page.occupancy
    return KernelView(
        code=page.code,
        blocks_per_sm=occupancy.blocks_per_sm if occupancy else None,
        occupancy=occupancy.fraction if occupancy else None,
        limited_by=", ".join(occupancy.limited_by) if occupancy else "",
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
        is_whole=not is_partly_seen(page),
        notes=(
            *(f"{claim} ({arithmetic})" if arithmetic else claim for claim, arithmetic in sentences(page)),
            *page.notes,
        ),
    )
