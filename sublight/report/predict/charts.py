"""The page's pictures as SVG by hand: ops under the roofline, the bottleneck over batch and context, GPUs as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sublight import units
from sublight.predict.grid import Grid
from sublight.predict.machine import Machine
from sublight.report.draw.roofline import decades
from sublight.report.draw.svg import share, style

Row = Mapping[str, Any]
CAUSES = {"weights": "p0", "cache": "p2", "activations": "p5", "compute": "p1", "launch": "p4", "link": "p3"}
BOUNDS = {"memory": "p0", "compute": "p1", "launch": "p4", "link": "p3"}
COLOURS = BOUNDS | CAUSES  # chosen so that colour-blind readers can tell them apart
WIDTH = 960
LABELLED = 0.08  # ops with a smaller share of the time get no name in the picture
CELL_W, CELL_H, LEFT, TOP = 84, 30, 76, 64


def text(x: float, y: float, words: str, kind: str = "ink", anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def _frame(width: int, height: int, title: str, *parts: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    body = "".join(parts)
    return f"{head}<title>{escape(title)}</title>{style(('light', 'dark'))}{body}</svg>"


def legend(x: float, y: float, names: Sequence[str]) -> str:
    parts = []
    for name in names:
        parts.append(f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="2" class="{COLOURS[name]}"/>')
        parts.append(text(x + 18, y, name))
        x += 40 + 7.5 * len(name)
    return "".join(parts)


def heatmap(grid: Grid) -> str:
    """A cell a batch and context: its colour is what bounds most of the time, its words are the time of the step."""
    width = LEFT + CELL_W * len(grid.batches) + 16
    height = TOP + CELL_H * len(grid.contexts) + 34
    seen = {cell.bottleneck for line in grid.cells for cell in line if cell.fits}
    parts = [legend(LEFT, 22, [name for name in CAUSES if name in seen])]
    for column, batch in enumerate(grid.batches):
        parts.append(text(LEFT + CELL_W * (column + 0.5), TOP - 10, str(batch), "faint", "middle"))
    for line, context in enumerate(grid.contexts):
        y = TOP + CELL_H * line
        parts.append(text(LEFT - 10, y + 20, str(context), "faint", "end"))
        parts += [_cell(LEFT + CELL_W * column, y, grid, line, column) for column in range(len(grid.batches))]
    parts.append(text(LEFT - 10, TOP - 10, "context", "faint", "end"))
    below = "batch from left to right; a cell without colour has no room"
    parts.append(text(LEFT, height - 10, below, "faint"))
    return _frame(width, height, f"Bottleneck of {grid.mode} on {grid.machine.gpu.name}", *parts)


def _cell(x: float, y: float, grid: Grid, line: int, column: int) -> str:
    cell = grid.cells[line][column]
    where = f"batch {grid.batches[column]}, context {grid.contexts[line]}"
    size = f'width="{CELL_W - 2}" height="{CELL_H - 2}" rx="3"'
    if not cell.fits:
        need = f"{where}: needs {units.text(cell.memory.total, 'B')}, {units.text(cell.room_bytes, 'B')} are there"
        box = f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="grid" fill="none"/>'
        return f"<g><title>{escape(need)}</title>{box}{text(x + CELL_W / 2, y + 19, '–', 'faint', 'middle')}</g>"
    name, part = cell.bottleneck, cell.bounds[cell.bottleneck]
    words = f"{where}: {units.text(cell.expected_s, 's')}, {units.percent(part)} of it bound by {name}, "
    words += f"{units.text(cell.tokens_per_s, '').strip()} tokens/s"
    box = f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{CAUSES[name]}" fill-opacity="{0.15 + 0.5 * part:.2f}"/>'
    label = text(x + CELL_W / 2, y + 19, units.text(cell.expected_s, "s"), "ink", "middle")
    return f"<g><title>{escape(words)}</title>{box}{label}</g>"


def roofline(row: Row, machine: Machine, dtype: str) -> str:
    """Each op by its FLOP a byte and its FLOP/s, as large as its share of the time; the roofs are the GPU's limits."""
    height, left, right, top, bottom = 470, 96, 24, 60, 70
    ops = [op for op in row["ops"] if op["flops"] and op["bytes"]]
    slope, flat = machine.limits.value("hbm_copy") or 1.0, machine.rate(dtype)
    rates = [op["flops"] * op["count"] / op["expected_s"] for op in ops]
    x_window = (min(op["intensity"] for op in ops) / 3, max(2 * flat / slope, 3 * max(op["intensity"] for op in ops)))
    y_window = (min(rates) / 3, 3 * flat)

    def x_of(intensity: float) -> float:
        return left + (WIDTH - left - right) * share(intensity, x_window)

    def y_of(rate: float) -> float:
        return height - bottom - (height - top - bottom) * share(rate, y_window)

    parts = [legend(left, 24, list(dict.fromkeys(op["bound"] for op in ops)))]
    for tick in decades(*x_window):
        x = x_of(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{height - bottom}" class="grid"/>')
        parts.append(text(x, height - bottom + 20, f"{tick:g}", "faint", "middle"))
    for tick in decades(*y_window):
        y = y_of(tick)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{WIDTH - right}" y2="{y:.1f}" class="grid"/>')
        words = units.text(tick, "FLOP/s").replace(".00", "").replace(".0", "")
        parts.append(text(left - 8, y + 4, words, "faint", "end"))
    ridge, begin = flat / slope, max(x_window[0], y_window[0] / slope)
    points = [(begin, slope * begin), (ridge, flat), (x_window[1], flat)]
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
    parts.append(f'<polyline points="{path}" class="roof"/>')
    memory, compute = units.text(slope, "B/s"), units.text(flat, "FLOP/s")
    parts.append(text(left + 8, y_of(flat) - 9, f"roofs: {compute} of products, {memory} of memory", "name"))
    placed: list[tuple[float, float]] = []
    for op, rate in sorted(zip(ops, rates, strict=True), key=lambda pair: -pair[0]["share"]):
        radius = 4 + 26 * op["share"] ** 0.5
        words = f"{op['name']}{' bwd' if op['direction'] == 'bwd' else ''}: {units.percent(op['share'])} of the time, "
        words += f"{units.text(op['expected_s'], 's')}, floor {units.text(op['floor_s'], 's')}, {op['how']}"
        spot = f'<circle cx="{x_of(op["intensity"]):.1f}" cy="{y_of(rate):.1f}" r="{radius:.1f}" fill-opacity="0.75"'
        parts.append(f'{spot} class="{BOUNDS[op["bound"]]}"><title>{escape(words)}</title></circle>')
        if op["share"] >= LABELLED:
            x, y = x_of(op["intensity"]), _free(placed, x_of(op["intensity"]), y_of(rate) + radius + 16)
            parts.append(text(x, y, op["name"], "ink", "middle"))
    parts.append(text((left + WIDTH - right) / 2, height - bottom + 44, "FLOP for each byte moved", "ink", "middle"))
    return _frame(WIDTH, height, f"Ops of {row['mode']} under the roofline of {row['gpu_name']}", *parts)


def _free(placed: list[tuple[float, float]], x: float, y: float) -> float:
    """The first height from y downwards where a label at x meets none that is there already."""
    while any(abs(x - other_x) < 150 and abs(y - other_y) < 15 for other_x, other_y in placed):
        y += 15
    placed.append((x, y))
    return y


def bars(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A bar a GPU: its length is the time, the dark part the floor, the whisker how far off it may be."""
    left, line = 190, 34
    height = line * len(rows) + 46
    longest = max(row["expected_s"] * (1 + row["error"]) for row in rows)
    scale = (WIDTH - left - 120) / longest
    parts = []
    for index, (row, name) in enumerate(zip(rows, names, strict=True)):
        y, kind = 8 + line * index, CAUSES[row["bound"]]
        length, floor = row["expected_s"] * scale, row["floor_s"] * scale
        low, high = (left + length * (1 + sign * row["error"]) for sign in (-1, 1))
        parts.append(text(left - 10, y + 17, name, "ink", "end"))
        parts.append(
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="24" rx="2" class="{kind}" fill-opacity="0.4"/>'
        )
        parts.append(f'<rect x="{left}" y="{y}" width="{floor:.1f}" height="24" rx="2" class="{kind}"/>')
        parts.append(f'<line x1="{low:.1f}" y1="{y + 12}" x2="{high:.1f}" y2="{y + 12}" class="roof"/>')
        parts.append(text(high + 8, y + 17, units.text(row["expected_s"], "s"), "ink"))
    words = "full colour: the floor; light: the time; line: how far off it may be"
    parts.append(text(left, height - 12, words, "faint"))
    return _frame(WIDTH, height, "GPUs side by side", *parts)
