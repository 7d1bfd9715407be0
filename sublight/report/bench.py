"""The bench table: every provider's time beside the floor and the fraction of the limit it reaches."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sublight import units
from sublight.correct import FACTOR
from sublight.cost import shape_text
from sublight.report.draw import tables
from sublight.report.draw.tables import plain
from sublight.report.limits import heading as limits_heading
from sublight.results import TOO_GOOD, Change, Result, Run

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
BAR = 10  # characters of a bar at 100 % of the limit
TOO_GOOD_MEANS = f"faster than {TOO_GOOD:g} × the limit: the cost or the measured limit is wrong, not the kernel good"


def dtype_text(dtype: str) -> str:
    return SHORT_DTYPES.get(dtype, dtype)


def too_good(row: Result) -> bool:
    return row.fraction is not None and row.fraction > TOO_GOOD


def wrong(row: Result) -> bool:
    return row.error is not None and row.error > FACTOR


def cases(rows: Iterable[Result]) -> Iterator[list[Result]]:
    """The rows of one op, direction, shape and data type: what providers are compared on."""
    for _, group in itertools.groupby(rows, key=lambda row: row.key[:-1]):
        yield list(group)


def fastest(case: Sequence[Result]) -> Result | None:
    timed = [row for row in case if row.median_s and not wrong(row) and not too_good(row)]
    return min(timed, key=lambda row: row.median_s or 0, default=None)


def bar(fraction: float | None) -> str:
    """
    >>> bar(1.0), bar(0.55), bar(0.0), bar(None)
    ('━━━━━━━━━━', '━━━━━╸    ', '          ', '          ')
    """
    whole, half = divmod(round(2 * BAR * min(max(fraction or 0.0, 0.0), 1.0)), 2)
    return ("━" * whole + "╸" * half).ljust(BAR)


def note(row: Result) -> str:
    """What a reader must know about a row, the most important first."""
    if row.unavailable is not None:
        return row.unavailable
    if wrong(row):
        return f"WRONG: {row.error:.1f}× error"
    if too_good(row):
        return "ERROR: above limit"
    bound = f"bound by {row.bound}" if row.bound not in ("", "memory") else ""
    warm = "inputs in cache" if row.cache == "warm" else ""
    handed_on = "by PyTorch" if row.provider == "sublight" and row.kernel and not row.ours else ""
    return "; ".join(filter(None, (bound, handed_on, row.note, warm)))


def heading(run: Run) -> str:
    """
    >>> from sublight.results import Limits
    >>> limits = Limits(device="NVIDIA H200", kind="cuda")
    >>> versions = {"driver": "570", "torch": "2.11", "triton": "", "commit": "abc", "date": ""}
    >>> heading(Run(gpu="NVIDIA H200", **versions, limits=limits, rows=()))
    'NVIDIA H200 · torch 2.11 · abc'
    >>> row = {"op": "add", "direction": "fwd", "shape": {}, "dtype": "float32", "provider": "torch"}
    >>> rows = (Result(**row, commit="abc"), Result(**row, commit="old"))
    >>> heading(Run(gpu="NVIDIA H200", **versions, limits=limits, rows=rows))
    'NVIDIA H200 · torch 2.11 · abc (1 of 2 rows at old)'
    """
    named = (("torch", run.torch), ("triton", run.triton))
    return " · ".join(
        [
            run.limits.device or run.gpu,
            *(f"{name} {version}" for name, version in named if version),
            *([f"{run.commit}{_older(run)}"] if run.commit not in ("", "unknown") else []),
        ]
    )


def _older(run: Run) -> str:
    """How many rows were measured at another commit, and which, in a file that was renewed in part."""
    counts = Counter(row.commit for row in run.rows if row.commit and row.commit != run.commit)
    words = ", ".join(f"{count} of {len(run.rows)} rows at {commit}" for commit, count in counts.items())
    return f" ({words})" if words else ""


def table(run: Run, *, bars: bool = True) -> Table:
    """The table for the terminal."""
    from rich.markup import escape

    names = ["case", "provider", "time", "floor", "of limit", *([""] if bars else [])]
    noted = ["note"] if any(note(row) for row in run.rows) else []
    out = plain(names + noted, right=("time", "floor", "of limit"), fold=("note",))
    for case in cases(run.rows):
        best = fastest(case)
        for index, row in enumerate(case):
            figures = (units.text(row.median_s, "s"), units.text(row.floor_s, "s"), units.percent(row.fraction))
            cells = [escape(cell) for cell in (row.provider, *figures, *([bar(row.fraction)] if bars else []))]
            style = _style(row, best=row is best)
            styled = [f"[{style}]{cell}[/]" if style else cell for cell in cells]
            words = [tables.note(note(row), style if "red" in style else "dim")] if noted else []
            out.add_row(case_text(row) if index == 0 else "", *styled, *words, end_section=index == len(case) - 1)
    return out


def case_text(row: Result) -> str:
    """
    >>> case_text(Result(op="add", direction="fwd", shape={"numel": 4096}, dtype="float32", provider="torch"))
    'add fwd 4096 fp32'
    """
    return f"{row.op} {row.direction} {shape_text(row.shape)} {dtype_text(row.dtype)}"


def _style(row: Result, *, best: bool) -> str:
    """A row's style: an error is red, a missing figure dim, our row coloured, the fastest bold."""
    if too_good(row) or wrong(row):
        return "bold red"
    if row.unavailable is not None:
        return "dim"
    return " ".join((["bold"] if best else []) + (["cyan"] if row.ours or row.provider == "sublight" else []))


def page(run: Run) -> RenderableType:
    """The table, where its floors come from, and a sentence for each kind of error."""
    from rich.console import Group
    from rich.text import Text

    shown = tables.Fitting((table(run), table(run, bars=False)))
    parts: list[RenderableType] = [tables.titled(heading(run), shown), Text("")]
    words = f"Bold: the fastest. Memory sets the floor unless a note says what. Limits: {limits_heading(run.limits)}."
    parts.append(Text(words, style="dim"))
    parts += [Text(line, style="bold yellow") for line in warnings(run)]
    parts += [Text(line, style="bold red") for line in errors(run.rows)]
    return Group(*parts)


def warnings(run: Run) -> list[str]:
    """What was wrong with the machine meanwhile."""
    when = "measured while the GPU was not well:" if run.limits.kind == "cuda" else "measured while"
    return [f"{when} {line}" for line in run.unwell]


def errors(rows: Sequence[Result]) -> list[str]:
    """A sentence for each kind of error in the rows; none where all is well."""
    lines = []
    if bad := sum(too_good(row) for row in rows):
        lines.append(f"error: {bad} row{'s are' if bad > 1 else ' is'} {TOO_GOOD_MEANS}")
    if bad := sum(wrong(row) for row in rows):
        words = "rows give wrong answers" if bad > 1 else "row gives a wrong answer"
        lines.append(f"error: {bad} {words}: further from float64 than twice PyTorch's own error")
    return lines


def compare_page(changes: Sequence[Change]) -> RenderableType:
    """The rows that moved beyond noise, slowest first, and how many did not."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    moved = sorted((change for change in changes if change.verdict != "same"), key=lambda change: -change.ratio)
    counts = {word: sum(change.verdict == word for change in changes) for word in ("slower", "faster", "same")}
    summary = f"{counts['slower']} slower, {counts['faster']} faster, {counts['same']} within noise"
    words = Text(f"{len(changes)} rows in both runs: {summary}" if changes else "no row is in both runs")
    if not moved:
        return words
    names = ("case", "provider", "before", "after", "change", "noise", "")
    out = plain(names, right=("before", "after", "change", "noise"))
    for change in moved:
        op, direction, shape, dtype, provider = change.key
        case = f"{op} {direction} {shape} {dtype_text(dtype)}"
        times = (units.text(change.before_s, "s"), units.text(change.after_s, "s"))
        style = "bold red" if change.verdict == "slower" else "green"
        cells = (case, provider, *times)
        verdict = (f"{100 * (change.ratio - 1):+.1f} %", f"{100 * change.noise:.1f} %", change.verdict)
        out.add_row(*map(escape, cells), *(f"[{style}]{cell}[/]" for cell in verdict))
    return Group(out, words)


def everything(run: Run, changes: Sequence[Change] | None, drawn: RenderableType | None) -> RenderableType:
    """What `sublight bench` prints: the table, the roofline, and what changed where that was asked."""
    from rich.console import Group
    from rich.text import Text

    parts = [page(run), drawn, compare_page(changes) if changes is not None else None]
    shown = [part for part in parts if part is not None]
    return Group(*(item for part in shown for item in (part, Text(""))))


def to_json(run: Run, changes: Sequence[Change] | None) -> dict[str, Any]:
    """The results file, with the changes where they were asked for."""
    data = run.to_json()
    if changes is not None:
        data["changes"] = [
            {**dataclasses.asdict(change), "ratio": change.ratio, "verdict": change.verdict} for change in changes
        ]
    return data
