"""A run as a page of the docs: every row, losses included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sublight import units
from sublight.cost import shape_text
from sublight.report import bench
from sublight.report import limits as limits_report
from sublight.results import Result, Run

OURS = "sublight"
SUMMARY = ("cases", "worst", "middle", "best", "slower in", "by PyTorch")
NEAR = 0.995  # a ratio that rounds to 1.00 is neither a win nor a loss
_SPECIAL = str.maketrans({"|": "\\|", "<": "&lt;", ">": "&gt;", "_": "\\_", "*": "\\*", "`": "\\`"})


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """
    >>> print(table(("op", "time"), [("a|b", "1 s")], right=("time",)))
    | op | time |
    | --- | ---: |
    | a\\|b | 1 s |
    """
    lines = ["| " + " | ".join(headings) + " |"]
    lines.append("| " + " | ".join("---:" if name in right else "---" for name in headings) + " |")
    lines += ["| " + " | ".join(escape(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def escape(words: str) -> str:
    return " ".join(words.translate(_SPECIAL).split())


def versus(case: Sequence[Result]) -> float | None:
    """The best peer's time over ours: above 1 we are faster; None where one of them is missing."""
    ours = [row.median_s for row in case if row.provider == OURS and row.median_s and not bench.wrong(row)]
    peers = [
        row.median_s for row in case if not row.ours and row.provider != OURS and row.median_s and not bench.wrong(row)
    ]
    return min(peers) / min(ours) if ours and peers else None


def page(run: Run) -> str:
    """The limits, a summary by op, and every row."""
    parts = [
        "# Benchmarks",
        f"{escape(bench.heading(run))}, measured {run.date[:10]}. This page is generated: `make docs`.",
        "## Limits of this machine",
        table(limits_report.HEADINGS, _limits(run), right=("value", "spec", "of spec")),
        "## Ours against the best of the others",
        "The ratio is the best peer's time over ours, in the same run on the same inputs: above 1.00 ours is faster. "
        "Only cases in which a kernel of ours ran are counted; in the last column's cases the call went to PyTorch.",
        table(("op", "", *SUMMARY), _summary(run), right=SUMMARY),
        "## Every row",
        "The floor is the time below which no implementation goes here; *of limit* is the floor over the time.",
        *_ops(run),
    ]
    return "\n\n".join(parts) + "\n"


def _limits(run: Run) -> list[tuple[str, ...]]:
    return [limits_report.line(limit).cells for limit in run.limits.limits]


def _summary(run: Run) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    by_op: dict[tuple[str, str], list[list[Result]]] = {}
    for case in bench.cases(run.rows):
        by_op.setdefault((case[0].op, case[0].direction), []).append(case)
    for (op, direction), cases in by_op.items():
        handed_on = [
            case for case in cases if any(row.provider == OURS and row.median_s and not row.ours for row in case)
        ]
        ratios = [ratio for case in cases if case not in handed_on and (ratio := versus(case)) is not None]
        figures = ("–",) * 4
        if ratios:
            middle = math.exp(sum(map(math.log, ratios)) / len(ratios))  # the geometric mean, as ratios ask
            losses = sum(ratio < NEAR for ratio in ratios)
            figures = (f"{min(ratios):.2f}", f"{middle:.2f}", f"{max(ratios):.2f}", str(losses))
        rows.append((op, direction, str(len(ratios)), *figures, str(len(handed_on))))
    return rows


def _ops(run: Run) -> list[str]:
    parts = []
    names = ("case", "provider", "time", "floor", "of limit", "best peer / ours", "kernel", "note")
    for op in dict.fromkeys(row.op for row in run.rows):
        rows = []
        for case in bench.cases(row for row in run.rows if row.op == op):
            ratio = versus(case)
            for index, row in enumerate(case):
                name = f"{row.direction} {shape_text(row.shape)} {bench.dtype_text(row.dtype)}" if index == 0 else ""
                figures = (units.text(row.median_s, "s"), units.text(row.floor_s, "s"), units.percent(row.fraction))
                against = f"{ratio:.2f}" if ratio and row.provider == OURS else ""
                rows.append((name, row.provider, *figures, against, row.kernel[:48], bench.note(row)))
        parts += [f"### {escape(op)}", table(names, rows, right=("time", "floor", "of limit", "best peer / ours"))]
    return parts
