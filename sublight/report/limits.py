"""The limits table: what was measured, the vendor's figure beside it, and what there is to say of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sublight import units
from sublight.report.draw.tables import note, plain, titled
from sublight.results import BUSY, UNWELL, Limit, Limits

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Judgement = Literal["normal", "low", "none", "–"]
STYLES: Mapping[Judgement, str] = {"normal": "green", "low": "bold yellow", "none": "dim", "–": "dim"}
HEADINGS = ("limit", "value", "spec", "of spec", "verdict", "note")
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row as text, for the terminal, HTML and Markdown alike."""

    name: str
    value: str
    spec: str
    share: str
    judgement: Judgement
    note: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.name, self.value, self.spec, self.share, self.judgement, self.note)


def line(limit: Limit) -> Line:
    """
    >>> line(Limit(name="hbm_copy", unit="B/s", value=4.27e12, spec=4.8e12, verdict="low: throttled")).cells
    ('hbm_copy', '4.27 TB/s', '4.80 TB/s', '89 %', 'low', 'throttled')
    >>> line(Limit(name="peer", unit="", unavailable="one GPU: no peer link")).cells
    ('peer', '–', '–', '–', 'none', 'one GPU: no peer link')
    """
    judgement, note = _judge(limit)
    return Line(
        name=limit.name,
        value=units.text(limit.value, limit.unit),
        spec=units.text(limit.spec, limit.unit),
        share=units.percent(limit.fraction_of_spec),
        judgement=judgement,
        note="; ".join(part for part in (note, detail_text(limit.detail)) if part),
    )


def _judge(limit: Limit) -> tuple[Judgement, str]:
    if limit.unavailable is not None:
        return "none", limit.unavailable
    word, _, cause = limit.verdict.partition(": ")
    if word == "low":
        return "low", cause
    return ("normal", "") if word == "normal" else ("–", "")


def detail_text(detail: Mapping[str, Any]) -> str:
    """How a figure came about, as the table's note.

    >>> detail_text({"bytes": 134217728, "shape": [8192, 8192, 8192], "how": "torch.mm", "threads": 2})
    '8192×8192×8192, torch.mm, 2 threads'
    """
    return ", ".join(write(detail[name]) for name, write in WORTH_READING.items() if detail.get(name))


def _shape_text(shape: Any) -> str:
    sizes = shape.values() if isinstance(shape, Mapping) else shape
    return shape if isinstance(shape, str) else "×".join(str(size) for size in sizes)


def _knee_text(knee: Mapping[str, Any]) -> str:
    """
    >>> _knee_text({"programs": 132, "warps": 8, "bytes_per_s": 4.1e12})
    'knee at 132 blocks of 8 warps'
    """
    return f"knee at {knee['programs']} blocks of {knee['warps']} warps"


WORTH_READING: Mapping[str, Callable[[Any], str]] = {  # parts of a limit's detail; the JSON has all
    "shape": _shape_text,
    "knee": _knee_text,
    "how": str,
    "method": str,
    "threads": lambda count: f"{count} thread{'s' if count > 1 else ''}",
}


def groups(limits: Limits) -> Iterator[tuple[Line, ...]]:
    """Limits of one family (the word before the first underscore) stand together, lone ones with their neighbours."""
    families = [list(family) for _, family in itertools.groupby(limits.limits, key=_family)]
    merged: list[list[Limit]] = []
    alone = False  # whether the last group is made of lone limits
    for family in families:
        if alone and len(family) == 1:
            merged[-1] += family
        else:
            merged.append(family)
        alone = len(family) == 1
    for group in merged:
        yield tuple(line(limit) for limit in group)


def _family(limit: Limit) -> str:
    return limit.name.split("_")[0]


def heading(limits: Limits) -> str:
    """The device and where its figures come from.

    >>> heading(Limits(device="NVIDIA H200", kind="cuda", driver="570.1", date="2026-11-15T02:00:00+0000"))
    'NVIDIA H200, driver 570.1, measured 2026-11-15 02:00'
    """
    driver = f", driver {limits.driver}" if limits.kind == "cuda" and limits.driver else ""
    source = limits.source if limits.source != "measured" or not limits.date else f"measured {limits.date}"
    return f"{limits.device}{driver}, {_shorter_dates(source, limits.date)}"


def _shorter_dates(text: str, date: str) -> str:
    return text.replace(date, date[:16].replace("T", " ")) if date else text


def table(limits: Limits) -> Table:
    """For the terminal."""
    from rich.markup import escape

    out = plain(HEADINGS, right=("value", "spec", "of spec"), fold=("note",))
    for group in groups(limits):
        for index, row in enumerate(group):
            cells = [escape(cell) for cell in row.cells[:4]]
            verdict = f"[{STYLES[row.judgement]}]{row.judgement}[/]"
            words = note(row.note, "yellow" if row.judgement == "low" else "dim")
            out.add_row(*cells, verdict, words, end_section=index == len(group) - 1)
    return out


def page(limits: Limits, better: Sequence[Limit] = ()) -> RenderableType:
    """The table, the memory curves under it, and what the dashes mean; `better`: what earlier runs reached."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [titled(heading(limits), table(limits)), Text("")]
    for limit in limits.limits:
        if limit.detail.get("curve"):
            parts.append(
                Text.from_markup(f"[bold]{limit.name}[/] by blocks, {units.text(limit.value, limit.unit)} at best")
            )
            parts.extend(Text(row) for row in curve_lines(limit))
            parts.append(Text(""))
    parts += [Text(line, style="bold yellow") for line in (*unwell_lines(limits), *busy_lines(limits))]
    if better:
        figures = ", ".join(f"{limit.name} {units.text(limit.value, limit.unit)}" for limit in better)
        words = f"measured better before: {figures}. Other commands go by these; `sublight limits --kept` shows all."
        parts.append(Text(words))
    if any(limit.verdict.startswith("unjudged") for limit in limits.limits):
        parts.append(Text("verdict –: no figure of this device is known to compare with", style="dim"))
    return Group(*parts)


def unwell_lines(limits: Limits) -> list[str]:
    """What was wrong with the GPU while these were measured.

    >>> shared = Limit(name="hbm_copy", unit="B/s", value=1e12, detail={"unwell": ["another process on it"]})
    >>> unwell_lines(Limits(device="NVIDIA H200", kind="cuda", limits=(shared,)))
    ['measured while the GPU was not well (another process on it): hbm_copy']
    """
    names: dict[str, list[str]] = {}
    for limit in limits.limits:
        for words in limit.detail.get(UNWELL, ()):
            names.setdefault(words, []).append(limit.name)
    return [f"measured while the GPU was not well ({words}): {', '.join(which)}" for words, which in names.items()]


def busy_lines(limits: Limits) -> list[str]:
    """Whether other programs used the processors while these were measured.

    >>> beside = Limit(name="host_copy", unit="B/s", value=1e9, detail={"busy": 0.84})
    >>> busy_lines(Limits(device="a CPU", kind="cpu", limits=(beside,)))
    ['measured while other programs used up to 84 % of the processors: measure again when they do not']
    """
    shares = [limit.detail[BUSY] for limit in limits.limits if limit.value is not None and limit.detail.get(BUSY)]
    used = f"used up to {units.percent(max(shares, default=0.0))} of the processors"
    return [f"measured while other programs {used}: measure again when they do not"] if shares else []


def curve_lines(limit: Limit) -> list[str]:
    """How the rate grows with the number of blocks, one line for each number of warps.

    >>> curve = [[1, 4, 1e9], [2, 4, 2e9], [4, 4, 4e9], [8, 4, 8e9]]
    >>> curve_lines(Limit(name="hbm_read", unit="B/s", value=8e9, detail={"curve": curve}))
    [' 4 warps  ▁▂▄█  1 to 8 blocks, 1.00 GB/s to 8.00 GB/s']
    """
    lines = []
    points = [tuple(point) for point in limit.detail["curve"]]
    top = max(rate for _, _, rate in points)
    for warps in sorted({point[1] for point in points}):
        series = sorted((blocks, rate) for blocks, count, rate in points if count == warps)
        (fewest, first), (most, last) = series[0], series[-1]
        bars = sparkline([rate for _, rate in series], top)
        ends = f"{units.text(first, limit.unit)} to {units.text(last, limit.unit)}"
        lines.append(f"{warps:2} warps  {bars}  {fewest} to {most} blocks, {ends}")
    return lines


def sparkline(values: Sequence[float], top: float) -> str:
    """
    >>> sparkline([0, 1, 4, 8], 8)
    '▁▁▄█'
    """
    return "".join(BLOCKS[max(0, min(7, round(8 * value / top) - 1))] for value in values)
