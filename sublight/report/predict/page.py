"""One self-contained page: GPUs side by side, ops under the roofline, the bottleneck over batch and context."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from sublight import units
from sublight.predict.estimate import Prediction
from sublight.predict.grid import Grid
from sublight.report.draw.page import Row, document, table
from sublight.report.predict import charts, terminal

MOST_ROWS = 200  # the longest table of predictions


def html(data: dict[str, Any], predictions: Sequence[Prediction], grids: Sequence[Grid]) -> str:
    """`predictions` are the predictions that `data` was made of, in the same order."""
    rows = data["predictions"]
    pairs = [(row, prediction) for row, prediction in zip(rows, predictions, strict=True) if row["fits"]]
    parts = [f'<p class="low">{escape(note)}</p>' for note in data["model"]["notes"]]
    for mode, title in terminal.TITLES.items():
        of_mode = [(row, prediction) for row, prediction in pairs if row["mode"] == mode]
        shown = [row for row in rows if row["mode"] == mode]
        if not shown:
            continue
        parts.append(f"<h2>{escape(title)}</h2>")
        if of_mode:
            parts.append(_side_by_side([row for row, _ in of_mode]))
            parts += _roofline(*of_mode[0])
        parts += [f'<p class="low">{escape(terminal.misfit(row))}</p>' for row in shown if not row["fits"]][:3]
        for grid in grids:
            if grid.mode == mode:
                parts.append(f"<h3>Bottleneck on {escape(grid.machine.label)}</h3>")
                parts.append(f'<div class="wide">{charts.heatmap(grid)}</div>')
    parts += _precisions(data)
    parts.append(_table(rows[:MOST_ROWS]))
    words = [*terminal.notes(rows), *terminal.in_fp8(data)]
    source = f"<p>Model: {escape(data['model']['source'])}. {escape(' '.join(words))}</p>"
    return document(f"{data['model']['name']}: a prediction", terminal.headline(data), *parts, source)


def _precisions(data: dict[str, Any]) -> list[str]:
    """Data types side by side, and whose accuracy is shown."""
    words = terminal.accuracy(data)
    parts = [f'<p class="low">{escape(words)}</p>'] if words else []
    if not data["precisions"]:
        return parts
    cells = [{"step": row["mode"], **terminal.precision_cells(row)} for row in data["precisions"]]
    sides = {name: "" if name in ("step", "GPU", "data types") else "r" for name in cells[0]}
    lines: list[Row] = [
        ("none" if cell["time"] == "no room" else "", [(sides[name], text) for name, text in cell.items()])
        for cell in cells
    ]
    head = [(side, name) for name, side in sides.items()]
    return [f"<h2>Data types side by side</h2>{table(head, lines)}", *parts]


def _side_by_side(rows: Sequence[dict[str, Any]]) -> str:
    """The GPUs side by side, at the first batch and context."""
    first = (rows[0]["batch"], rows[0]["context"])
    same = [row for row in rows if (row["batch"], row["context"]) == first]
    words = f"Batch {first[0]}, context {first[1]}."
    picture = charts.bars(same, [terminal.label(row) for row in same])
    return f'<p>{escape(words)}</p><div class="wide">{picture}</div>'


def _roofline(row: dict[str, Any], prediction: Prediction) -> list[str]:
    words = terminal.bound_sentence(row)
    picture = charts.roofline(row, prediction.machine, prediction.step.precision.products)
    return [
        f"<h3>Ops on {escape(terminal.label(row))}</h3><p>{escape(words)}</p>",
        f'<div class="wide">{picture}</div>',
    ]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = (
        "GPU",
        "step",
        "batch",
        "context",
        "time",
        "±",
        "how",
        "floor",
        "tokens/s",
        "MFU",
        "memory",
        "largest batch",
        "bound",
    )
    sides = ("", "", "r", "r", "r", "r", "note", "r", "r", "r", "r", "r", "note")
    lines: list[Row] = []
    for row in rows:
        head = (terminal.label(row), row["mode"], str(row["batch"]), str(row["context"]))
        tail = (units.text(row["memory_bytes"]["total"], "B"), str(row["largest_batch"]))
        if row["fits"]:
            known = (f"{100 * row['error']:.0f} %", terminal.how_known(row))
            times = (units.text(row["expected_s"], "s"), *known, units.text(row["floor_s"], "s"))
            rates = (units.text(row["tokens_per_s"], "").strip(), units.percent(row["mfu"]))
        else:
            times, rates = ("no room", "–", "–", "–"), ("–", "–")
        cells = (*head, *times, *rates, *tail, row.get("bound", ""))
        lines.append(("" if row["fits"] else "none", list(zip(sides, cells, strict=True))))
    return f"<h2>All predictions</h2>{table(list(zip(sides, names, strict=True)), lines)}"
