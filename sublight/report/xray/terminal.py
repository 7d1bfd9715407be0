"""A kernel's page in the terminal: its resources GPU by GPU, what it issues and moves, what holds it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sublight import units
from sublight.report.draw.tables import Fitting, note, plain, wrapped
from sublight.report.xray import summary as xray_summary
from sublight.report.xray.causes import Cause, cause_lines, causes, indented
from sublight.report.xray.facts import (
    counted,
    facts,
    grouped,
    is_partly_seen,
    joined,
    over_ideal,
    region_name,
    regions,
    sentences,
    specialised,
    view,
)
from sublight.xray.examine import Page

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MOST_KINDS = 6  # of instructions, named in the row of a loop
MOST_ACCESSES = 24
WORTH_MARKING = xray_summary.BAD_RATIO
T = TypeVar("T")
QUIET = ("nop", "move", "uniform", "control", "constant load", "other")


def to_json(pages: Sequence[Page]) -> dict[str, Any]:
    return {"kernels": [page.to_json() for page in pages]}


def page(pages: Sequence[Page], *, target: str = "", full: bool = False) -> RenderableType:
    """One kernel whole, GPUs side by side; of several a summary and what is to be mended, and each whole if `full`."""
    from rich.console import Group
    from rich.text import Text

    groups = grouped(pages)
    several = len({each.code.name for each in pages}) > 1
    parts: list[RenderableType] = []
    if len(groups) > 1:
        whose = f" of {target}" if target else ""
        keys = list(dict.fromkeys(each.code.gpu.key for each in pages))
        parts += [Text(f"{counted(len(groups), 'kernel')}{whose} on {', '.join(keys)}", style="bold")]
        parts += [xray_summary.table([view(each) for each in pages]), Text("")]
    if full or not several:
        for group in groups:
            parts += [*_kernel(group), Text("")]
        return Group(*parts[:-1])
    for group in groups:
        parts += _to_mend(group)
    name = f"{target}:{groups[0][0].code.name}"
    parts.append(Text(f"one kernel's whole page: {name}; all of them: --full", style="dim"))
    return Group(*parts)


def _kernel(group: Sequence[Page]) -> Iterator[RenderableType]:
    from rich.text import Text

    code = group[0].code
    at = f"  {Path(code.file).name}" if code.file else ""
    yield Text.assemble((code.name, "bold"), (at, "dim"))
    for keys, words in _distinct(group, lambda each: specialised(each.code)):
        if words:
            yield indented(Text(f"{keys}: {words}" if keys else words, style="dim"))
    yield Text("")
    yield resources(group)
    yield Text("")
    yield from _sentences(group)
    yield from _separated(_occupancy(group))
    yield from _separated(_roof(group))
    for keys, rows in _distinct(group, _mix_rows):
        yield from _separated([_mix(rows, keys)])
    for keys, accesses in _distinct(group, _access_rows):
        yield from _separated(_accesses(accesses, keys) if accesses else ())
    yield Text("")
    yield from _findings(group)
    for words in dict.fromkeys(words for each in group for words in each.notes):
        yield indented(Text(f"note: {words}", style="dim"))


def _distinct(group: Sequence[Page], words_of: Callable[[Page], T]) -> list[tuple[str, T]]:
    """What is words_of of each GPU, once for those of which it is the same; they are named where not all agree."""
    kept: list[tuple[list[str], T]] = []
    for each in group:
        words = words_of(each)
        for keys, other in kept:
            if other == words:
                keys.append(each.code.gpu.key)
                break
        else:
            kept.append(([each.code.gpu.key], words))
    return [(", ".join(keys) if len(kept) > 1 else "", words) for keys, words in kept]


def _separated(parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    from rich.text import Text

    for at, part in enumerate(parts):
        yield from () if at else (Text(""),)
        yield part


def resources(group: Sequence[Page]) -> Table:
    """What a block takes and how many an SM holds, a column for each GPU."""
    keys = [each.code.gpu.key for each in group]
    out = plain(("", *keys), right=keys)
    rows = [facts(each) for each in group]
    for name in dict.fromkeys(name for row in rows for name in row):
        out.add_row(name, *(row.get(name, "") for row in rows))
    return out


def _sentences(group: Sequence[Page]) -> Iterator[RenderableType]:
    from rich.text import Text

    for keys, claims in _distinct(group, lambda each: tuple(sentences(each))):
        for claim, arithmetic in claims:
            behind = f" ({arithmetic})" if arithmetic else ""
            yield indented(Text.assemble((f"{keys}: " if keys else "", "bold"), claim, (behind, "dim")))


def _occupancy(group: Sequence[Page]) -> Iterator[RenderableType]:
    """By the block's size, a row for each GPU."""
    from rich.text import Text

    tables = {each.code.gpu.key: {row.threads: row for row in each.table} for each in group}
    sizes = sorted({size for rows in tables.values() for size in rows})
    if not sizes:
        return
    is_triton = all(each.code.ttgir for each in group)
    heads = [str(-(-size // 32) if is_triton else size) for size in sizes]
    out = plain(("num_warps" if is_triton else "threads a block", *heads), right=heads)
    for key, rows in tables.items():
        all_best = all(row.is_best for row in rows.values())
        cells = []
        for size in sizes:
            row = rows.get(size)
            share = units.percent(row.occupancy.fraction) if row else ""
            marks = ("*" if row.is_best and not all_best else "") + (">" if row.is_compiled else "") if row else ""
            cells.append(f"{marks}{share}")
        out.add_row(f"{key} occupancy", *cells)
    yield out
    yield indented(Text("> as compiled; * best, if registers and shared memory stay as they are", style="dim"))


def _roof(group: Sequence[Page]) -> Iterator[RenderableType]:
    """The times below which nothing lets the launch go; of one GPU with the reasons."""
    from rich.text import Text

    times = [{bound.name: bound for bound in each.roof.bounds} for each in group]
    known = [name for name in times[0] if any(row[name].seconds is not None for row in times if name in row)]
    if not known:
        if times[0]:
            yield indented(Text(f"no time can be told: {next(iter(times[0].values())).detail}"))
        return
    keys = [each.code.gpu.key for each in group]
    if len(group) > 1:
        out = plain(("no faster than", *keys), right=keys)
        for name in known:
            out.add_row(name, *(units.text(row[name].seconds if name in row else None, "s") for row in times))
        yield out
        return
    out = plain(("no faster than", "time", "× floor", "because"), right=("time", "× floor"), fold=("because",))
    floor = times[0]["floor"].seconds if "floor" in times[0] else None
    for name, bound in times[0].items():
        over = f"{bound.seconds / floor:.2f}" if floor and bound.seconds is not None and name != "floor" else ""
        out.add_row(name, units.text(bound.seconds, "s"), over, wrapped(bound.detail))
    yield out


def _mix_rows(each: Page) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for region in regions(each):
        kinds = sorted(region.counts.items(), key=lambda item: -item[1])
        named = ", ".join([f"{count} {kind}" for kind, count in kinds if kind not in QUIET][:MOST_KINDS])
        clocks = f"{region.clocks_per_turn:,.0f}"
        rows.append((region_name(region), f"{region.instructions:,}", clocks, region.limit or "", named))
    return rows


def _mix(rows: Sequence[tuple[str, ...]], keys: str) -> RenderableType:
    title = f"instructions, {keys}" if keys else "instructions"
    heads = (title, "count", "clocks", "waits for", "what they are")
    choices = []
    for left_out in ((), ("waits for",)):
        shown = [at for at, name in enumerate(heads) if name not in left_out]
        out = plain([heads[at] for at in shown], right=("count", "clocks"), fold=("what they are",))
        for row in rows:
            cells: list[RenderableType] = [*row[:-1], wrapped(row[-1])]
            out.add_row(*(cells[at] for at in shown))
        choices.append(out)
    return Fitting(tuple(choices))


def _access_rows(each: Page) -> list[tuple[RenderableType, ...]]:
    """By line and kind. Requests are left out: they are of the blocks that were followed, not of the launch."""
    rows: list[tuple[RenderableType, ...]] = []
    for row in joined(each.accesses):
        per, conflict, ratio = row.sectors_per_request, row.bank_conflict, over_ideal(row)
        rows.append(
            (
                str(row.place.line) if row.place else "",
                f"{row.space} {row.kind}",
                str(row.bytes_per_thread),
                "" if per is None else _marked(f"{per:.3g}", is_bad=(ratio or 1) > WORTH_MARKING),
                "" if per is None else f"{row.ideal_sectors / row.requests:.3g}",
                "" if conflict is None else _conflict(conflict),
                wrapped(row.unknown),
            )
        )
    return rows


def _accesses(rows: Sequence[Sequence[RenderableType]], keys: str) -> Iterator[RenderableType]:
    title = f"memory access, {keys}" if keys else "memory access"
    right = ("line", "bytes", "sectors", "ideal", "bank conflict")
    heads = ["line", title, *right[1:], *["not known"] * any(str(row[-1]) for row in rows)]
    out = plain(heads, right=right, fold=("not known",))
    for row in rows[:MOST_ACCESSES]:
        out.add_row(*row[: len(heads)])
    yield out
    if len(rows) > MOST_ACCESSES:
        yield indented(note(f"{counted(len(rows) - MOST_ACCESSES, 'more row')}: --html and --json have them all"))


def _conflict(ways: float) -> str:
    return "none" if ways < 1.005 else _marked(f"{ways:.3g}-way", is_bad=ways > WORTH_MARKING)


def _marked(words: str, *, is_bad: bool) -> str:
    return f"[bold red]{words}[/]" if is_bad else words


def _held(group: Sequence[Page]) -> list[tuple[Cause, str]]:
    """Each cause once, what is to be mended first, with the GPUs that it is true of where not of all."""
    held: dict[tuple[str, str, str], tuple[Cause, list[str]]] = {}
    for each in group:
        for cause in causes(each.findings):
            held.setdefault((cause.ids, cause.where, cause.lead.detail), (cause, []))[1].append(each.code.gpu.key)
    labelled = [(cause, f" ({', '.join(keys)})" if len(keys) < len(group) else "") for cause, keys in held.values()]
    return sorted(labelled, key=lambda item: item[0].lead.is_information)


def _findings(group: Sequence[Page]) -> Iterator[RenderableType]:
    from rich.text import Text

    held = _held(group)
    if all(cause.lead.is_information for cause, _ in held):
        if any(is_partly_seen(each) for each in group):
            yield Text("  nothing to mend in what could be seen")
        else:
            yield Text("  nothing to mend in the code", style="green")
    for cause, only in held:
        yield from cause_lines(cause, only=only)


def _to_mend(group: Sequence[Page]) -> Iterator[RenderableType]:
    for cause, only in _held(group):
        if not cause.lead.is_information:
            yield from cause_lines(cause, of=group[0].code.name, only=only)
