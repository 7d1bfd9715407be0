"""`explain` in the terminal: the verdict, where the step goes, what to change, and the ops behind it.

Names come from traces, so nothing here is markup: every cell is a Text, and what a terminal would obey is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sublight import units
from sublight.diagnose.record import BREAKDOWN, Explanation, Finding, OpRow, RangeRow
from sublight.diagnose.source import SourceLine
from sublight.report.bench import dtype_text
from sublight.report.draw.code import Code
from sublight.report.draw.tables import Fitting, plain, titled
from sublight.report.explain.causes import cause
from sublight.results import TOO_GOOD

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

LEAST_SHARE = 0.005  # parts with a smaller share of the step get no line in the legend
NOTHING = 1e-4  # a smaller share of the step is rounding
FULL_FINDINGS = 5
TOP_OPS = 10
COLOURS = {
    "floor": "green",
    "fusable": "bright_blue",
    "above_floor": "yellow",
    "unknown": "bright_black",
    "launch": "red",
    "sync": "magenta",
    "data": "dark_orange",
    "python": "bright_magenta",
    "copy": "blue",
    "allocator": "dark_goldenrod",
    "communication": "cyan",
    "start_up": "bright_yellow",
    "other": "white",
}
LETTERS = dict(zip(BREAKDOWN, "FUA?LSDPCMNTO", strict=True))  # a letter for each part, for terminals without colours


def page(explanation: Explanation) -> RenderableType:
    """Everything, for 80 columns and more."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(printable(explanation.sentence), style="bold"),
        *(Text(f"! {printable(words)}", style="yellow") for words in explanation.caveats),
        *_heading(explanation),
        Text(""),
    ]
    parts += [StepBar(explanation), Text("")]
    parts += _findings(explanation)
    if any(row.device_s > 0 for row in explanation.ops):
        parts += [_op_table(explanation), Text("")]
    if ranges := shown_ranges(explanation):
        parts += [_range_table(explanation, ranges), Text("")]
    parts += [Text(f"note: {printable(words)}", style="dim") for words in explanation.notes]
    return Group(*parts)


def printable(words: str) -> str:
    """A text without control characters: an escape sequence in a kernel's name must not reach the terminal.

    >>> printable("gemm\\x1b[2Jnn\\ta")
    'gemm�[2Jnn a'
    """
    return "".join(sign if sign.isprintable() else " " if sign in "\t\n" else "�" for sign in words)


def shortened(words: str, most: int) -> str:
    """The middle gives way: a name's ends tell more.

    >>> shortened("aten::native_layer_norm_backward", 20)
    'aten::nati…_backward'
    """
    words = printable(words)
    if len(words) <= most:
        return words
    tail = (most - 1) // 2
    return f"{words[: most - 1 - tail]}…{words[len(words) - tail :]}"


def device_word(explanation: Explanation) -> str:
    """The heading of the device's column: GPU, or device where a CPU ran the ops."""
    return "GPU" if explanation.kind == "cuda" else "device"


def step_text(explanation: Explanation) -> str:
    """The step's time, with its spread where there is one."""
    spread = f" ± {units.text(explanation.step_spread_s, 's')}" if explanation.step_spread_s > 0 else ""
    return f"{units.text(explanation.step_s, 's')}{spread}"


def steps_text(explanation: Explanation) -> str:
    """
    >>> from sublight.report.explain import fakes
    >>> steps_text(fakes.explanation())
    '3 steps (optimizer steps)'
    """
    if explanation.span == "run":
        return explanation.steps_from
    return f"{explanation.steps} step{'s' if explanation.steps != 1 else ''} ({explanation.steps_from})"


def floor_text(explanation: Explanation) -> str:
    """The step's floor and how much of the limit that is, or why nobody knows.

    >>> from sublight.report.explain import fakes
    >>> floor_text(fakes.explanation())
    'floor 3.60 ms · 18 % of the limit'
    """
    if explanation.fraction is not None:
        return f"floor {units.text(explanation.floor_s, 's')} · {units.percent(explanation.fraction)} of the limit"
    if not explanation.limits.limits:
        return "floor unknown: no limits"
    unknown = units.percent(share(explanation.unknown_s, explanation))
    return f"floor unknown: no cost is known for {unknown} of the {explanation.span}"


def share(seconds: float, explanation: Explanation) -> float | None:
    """A time as a share of the step."""
    return seconds / explanation.step_s if explanation.step_s > 0 else None


def saving_text(seconds: float, explanation: Explanation) -> str:
    return f"{units.text(seconds, 's')} ({units.percent(share(seconds, explanation))} of the {explanation.span})"


def combined_text(explanation: Explanation) -> str:
    """A sentence: what all findings together save, and why that is less than their sum."""
    if not explanation.findings:
        return "No change that can be named saves enough to mention."
    left_s = explanation.step_s - explanation.combined_saving_s
    many = "All fixed together" if len(explanation.findings) > 1 else "Fixed"
    nothing = left_s < NOTHING * explanation.step_s
    left = "next to nothing: there is no other work in it" if nothing else units.text(left_s, "s")
    words = f"{many}: saves {saving_text(explanation.combined_saving_s, explanation)}, leaving {left}"
    if explanation.floor_known:
        lower = explanation.fixed_floor_s < 0.99 * explanation.floor_s
        why = ", as some work goes" if lower else ""
        floor = units.text(explanation.fixed_floor_s if lower else explanation.floor_s, "s")
        words += f" (floor {'then ' if lower else ''}{floor}{why})"
    alone_s = sum(finding.saving_s for finding in explanation.findings)
    if alone_s > 1.01 * explanation.combined_saving_s:
        words += f". Each alone would add up to {units.text(alone_s, 's')}: they overlap"
    return f"{words}."


def _heading(explanation: Explanation) -> Iterator[Text]:
    from rich.text import Text

    figures = (f"{explanation.span} {step_text(explanation)}", floor_text(explanation), steps_text(explanation))
    yield Text(printable(" · ".join(figures)))
    yield Text(printable(f"{explanation.device} · limits: {explanation.limits_from}"), style="dim")


@dataclass(frozen=True, slots=True)
class StepBar:
    """Where the step goes, as wide as the terminal, and the legend below it."""

    explanation: Explanation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        whole = self.explanation
        columns = min(options.max_width, 120)
        parts = [name for name in BREAKDOWN if (share(whole.breakdown.get(name, 0.0), whole) or 0.0) > LEAST_SHARE]
        plain_bar = console.color_system is None
        bar = Text()
        for name, cells in zip(parts, cells_of([whole.breakdown[name] for name in parts], columns), strict=True):
            bar.append((LETTERS[name] if plain_bar else "█") * cells, style=COLOURS[name])
        yield bar
        widest = max((len(BREAKDOWN[name]) for name in parts), default=0)
        entries = []
        for name in parts:
            seconds = whole.breakdown[name]
            entry = Text(LETTERS[name] if plain_bar else "■", style=COLOURS[name])
            entry.append(f" {BREAKDOWN[name]:{widest}} ", style="default")
            entry.append(f"{units.text(seconds, 's'):>8} {units.percent(share(seconds, whole)):>6}", style="bold")
            entries.append(entry)
        yield from _in_columns(entries, options.max_width)


def cells_of(values: Sequence[float], cells: int) -> list[int]:
    """Characters for each part: at least one, together exactly `cells`, by largest remainder.

    >>> cells_of([70, 29, 1], 10), cells_of([1, 1, 1], 10), cells_of([], 10)
    ([6, 3, 1], [4, 3, 3], [])
    """
    total = sum(values)
    if not values or total <= 0:
        return []
    spare = max(0, cells - len(values))
    exact = [spare * value / total for value in values]
    counts = [int(part) for part in exact]
    by_remainder = sorted(range(len(values)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: spare - sum(counts)]:
        counts[index] += 1
    return [count + 1 for count in counts]


def _in_columns(entries: Sequence[Text], width: int) -> Iterator[Text]:
    """As many in a line as fit, each as wide as the widest."""
    from rich.text import Text

    if not entries:
        return
    column = max(entry.cell_len for entry in entries) + 3
    a_line = max(1, (width + 3) // column)
    for first in range(0, len(entries), a_line):
        line = Text(no_wrap=True, overflow="ellipsis")
        for entry in entries[first : first + a_line]:
            line.append(entry)
            line.append(" " * (column - entry.cell_len))
        line.rstrip()
        yield line


def _findings(explanation: Explanation) -> Iterator[RenderableType]:
    from rich.text import Text

    for number, finding in enumerate(explanation.findings[:FULL_FINDINGS], 1):
        yield from _finding(number, finding, explanation)
    if more := explanation.findings[FULL_FINDINGS:]:
        ids = ", ".join(finding.id for finding in more)
        saved = units.text(max(finding.saving_s for finding in more), "s")
        yield Text(f"and {len(more)} more, each saving {saved} or less: {printable(ids)}", style="dim")
    yield Text(combined_text(explanation), style="bold" if explanation.findings else "")
    yield Text("")


def _finding(number: int, finding: Finding, explanation: Explanation) -> Iterator[RenderableType]:
    """A finding; the first one's title and saving are the headline, and are not repeated."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    head = Text(f"{number}  ", style="dim")
    head.append(printable(finding.id), style=f"bold {COLOURS[cause(finding.id)]}")
    if not is_headline(finding, explanation):
        head.append(f"  saves {saving_text(finding.saving_s, explanation)}", style="bold green")
        yield head
        yield Padding(Text(printable(finding.title)), (0, 0, 0, 3), expand=False)
    else:
        yield head
    for words in shown_evidence(finding):
        bullet = Table.grid(padding=(0, 1, 0, 0))
        bullet.add_row(Text("·", style="dim"), Text(printable(words), style="dim"))
        yield Padding(bullet, (0, 0, 0, 3), expand=False)
    for line in finding.sources:
        if line.before:
            yield from _source(line, explanation.span)
    yield Code("\n".join(map(printable, finding.code.splitlines())))
    yield Text("")


def shown_evidence(finding: Finding) -> list[str]:
    """The evidence; places are left out where their lines are shown anyway."""
    shown = any(line.before for line in finding.sources)
    return [words for words in finding.evidence if not (shown and words.startswith(("at ", "the longest end at ")))]


def is_headline(finding: Finding, explanation: Explanation) -> bool:
    return bool(explanation.findings) and finding is explanation.findings[0] and explanation.verdict == finding.id


def _source(line: SourceLine, span: str) -> Iterator[RenderableType]:
    """The user's own line, and the line proposed in its place."""
    from rich.padding import Padding
    from rich.text import Text

    often = line.share or f"{units.count(line.count)} {'a step' if span == 'step' else 'in the run'}"
    place = Text(f"{printable(line.place)}, {printable(often)}:", style="dim")
    yield Padding(place, (0, 0, 0, 3), expand=False)
    shown = [("-" if line.after else " ", line.before, "red" if line.after else "")]
    shown += [("+", line.after, "green")] if line.after else []
    for sign, words, style in shown:
        text = Text(f"{sign} {printable(words.strip())}", style=style, overflow="fold")
        yield Padding(text, (0, 0, 0, 6), expand=False)


def _op_table(explanation: Explanation) -> RenderableType:
    rows = [row for row, _ in together(explanation.ops)]
    shown = rows[:TOP_OPS]
    count = f"{len(shown)} of {len(rows)}" if len(rows) > len(shown) else "all"
    title = f"Ops by {device_word(explanation)} time, per {explanation.span} ({count})"
    choices = (
        _ops(explanation, shown, op=40, shape=36, dtype=True, where=True),
        _ops(explanation, shown, op=34, shape=28, dtype=True, where=False),
        _ops(explanation, shown, op=26, shape=20, dtype=False, where=False),
        _ops(explanation, shown, op=22, shape=0, dtype=False, where=False),
    )
    return titled(title, Fitting(choices))


def together(rows: Sequence[OpRow]) -> list[tuple[OpRow, list[OpRow]]]:
    """One row an op, shape and type, wherever in the model it ran, and the rows that it stands for, longest first;
    those of no time are left out.
    """
    groups: dict[tuple[str, str, str], list[OpRow]] = {}
    for row in rows:
        if row.device_s > 0:
            groups.setdefault((row.name, row.shape, row.dtype), []).append(row)
    merged = []
    for members in groups.values():
        first = members[0]  # the longest of them
        known = all(row.floor_s is not None for row in members)
        whole = replace(
            first,
            module="",
            source=_places(members),
            calls=sum(row.calls for row in members),
            cpu_s=sum(row.cpu_s for row in members),
            device_s=sum(row.device_s for row in members),
            floor_s=sum(row.floor_s or 0.0 for row in members) if known else None,
            flops=sum(row.flops for row in members),
            bytes=sum(row.bytes for row in members),
        )
        merged.append((whole, members))
    return sorted(merged, key=lambda pair: -pair[0].device_s)


def _places(rows: Sequence[OpRow]) -> str:
    """Where equal calls come from, in a few words."""
    sources = dict.fromkeys(row.source for row in rows if row.source)
    places = dict.fromkeys(where for row in rows if (where := where_text(row)))
    if len(sources) == 1 and len(places) > 1:
        return f"{next(iter(sources))}, {len(places)} modules"
    return next(iter(places), "") + (f" and {len(places) - 1} more" if len(places) > 1 else "")


def _ops(explanation: Explanation, rows: Sequence[OpRow], *, op: int, shape: int, dtype: bool, where: bool) -> Table:
    from rich.text import Text

    figures = ("calls", "CPU", device_word(explanation), "floor", "of limit")
    names = ["op", *(["shape"] if shape else []), *(["dtype"] if dtype else []), *figures, "bound"]
    out = plain([*names, *(["where"] if where else [])], right=figures, fold=("where",))
    for row in rows:
        cells = [shortened(row.name, op)]
        cells += [shortened(row.shape, shape)] if shape else []
        cells += [printable(dtype_text(row.dtype))] if dtype else []
        cells += [
            units.count(row.calls),
            *(units.text(time_s, "s") for time_s in (row.cpu_s, row.device_s, row.floor_s)),
        ]
        cells += [units.percent(row.fraction), shortened(bound_text(row), 14)]
        too_good = row.fraction is not None and row.fraction > TOO_GOOD
        place = [Text(printable(where_text(row)), style="dim", overflow="fold")] if where else []
        out.add_row(*(Text(cell, style="bold red" if too_good else "") for cell in cells), *place)
    return out


def bound_text(row: OpRow) -> str:
    return row.bound if row.floor_s is not None else "cost unknown"


def where_text(row: OpRow) -> str:
    """The line that called it, and the place in the model; a number alone says which layer it is.

    >>> from sublight.report.explain import fakes
    >>> row = fakes.explanation().ops[0]
    >>> where_text(replace(row, source="train.py:41", module="Net/mlp"))
    'train.py:41 in Net/mlp'
    >>> where_text(replace(row, source="", module="3"))
    'module 3'
    """
    module = f"module {row.module}" if row.module.replace(".", "").isdecimal() else row.module
    return f"{row.source} in {module}" if row.source and module else row.source or module


def shown_ranges(explanation: Explanation) -> list[RangeRow]:
    """The ranges that took any time."""
    return [row for row in explanation.ranges if max(row.host_s, row.device_s) > 0]


def _range_table(explanation: Explanation, rows: Sequence[RangeRow]) -> RenderableType:
    from rich.text import Text

    figures = ("calls", "CPU", device_word(explanation), "streams")
    out = plain(("range", *figures), right=figures)
    for row in rows:
        times = (units.text(row.host_s, "s"), units.text(row.device_s, "s"))
        out.add_row(
            *(Text(cell) for cell in (shortened(row.name, 40), units.count(row.calls), *times, str(row.streams)))
        )
    return titled(f"Ranges, per {explanation.span}", out)
