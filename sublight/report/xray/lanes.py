"""Which lane holds which element, as a grid: in the terminal, and as SVG that names every element under the pointer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from sublight.report.draw import page as html_page
from sublight.report.draw import tables
from sublight.xray.lanes import Layout, Shared, Spread

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sublight.xray.record import Code

LINES = 16  # height of a grid in the terminal
CELLS = 11  # cells side by side in 80 columns
HTML_LINES, HTML_CELLS = 64, 64
STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")  # a warp each
SHADES = ("#bfe3f7", "#f6cfe6", "#cdeccb", "#f9e6b3", "#cfd4f7", "#f7cdc5", "#c9f0ea", "#e4d3f5")
LEAD = (
    "A cell is what one thread holds side by side, as warp.lane; of shared memory what lies side by side, by its bank."
)


def run_of(where: Spread | Shared) -> int:
    """How many neighbours of the last dimension a cell stands for: one thread's, or one stretch of shared memory."""
    last = where.shape[-1]
    if isinstance(where, Spread):
        run = 1
        for basis in where.register:
            if basis[:-1] != (0,) * (len(basis) - 1) or basis[-1] != run:
                break
            run *= 2
        return min(run, last)
    run = max(1, min(128 // where.item_bits, last))
    while run > 1 and not all(
        offset - where.offsets[(*at[:-1], at[-1] // run * run)] == at[-1] % run for at, offset in where.offsets.items()
    ):
        run //= 2
    return run


def grid(where: Spread | Shared) -> list[list[tuple[int, ...]]]:
    """The first element of each cell, line by line; a vector goes on in the next line."""
    run = run_of(where)
    if len(where.shape) == 1:
        cells: list[tuple[int, ...]] = [(at,) for at in range(0, where.shape[0], run)]
        return [cells[begin : begin + 8] for begin in range(0, len(cells), 8)]
    lines: list[tuple[int, ...]] = [()]
    for size in where.shape[:-1]:
        lines = [(*line, at) for line in lines for at in range(size)]
    return [[(*line, at) for at in range(0, where.shape[-1], run)] for line in lines]


def label(where: Spread | Shared, element: tuple[int, ...]) -> str:
    if isinstance(where, Shared):
        return str(where.bank(element))
    warp, lane, _ = where.holders[element][0]
    return f"{warp}.{lane}"


def summary(layout: Layout) -> str:
    """blocked 64x32 f16: 4 warps of 32 lanes, 16 elements a thread, each element in one thread"""
    sizes = "x".join(map(str, layout.shape))
    head = f"{layout.name} {sizes} {layout.dtype}"
    if layout.where is None:
        return f"{head}: not drawn: {layout.why_not}"
    if isinstance(layout.where, Shared):
        size = math.prod(layout.shape) * layout.where.item_bits // 8
        return f"{head}: {size} bytes of shared memory; a cell is {run_of(layout.where)} side by side, and its bank"
    where = layout.where
    copies = f"in {where.copies} threads" if where.copies > 1 else "in one thread"
    return (
        f"{head}: {1 << len(where.warp)} warps of {1 << len(where.lane)} lanes, {where.elements} elements a "
        f"thread, each {copies}; a cell is {run_of(where)} side by side, as warp.lane"
    )


def is_whole(layout: Layout) -> bool:
    """Whether a layout is no part of another: neither a slice, nor a line that is about to be broadcast."""
    return not layout.name.startswith("slice") and 1 not in layout.shape


def page(kernels: Sequence[tuple[Code, Sequence[Layout]]], *, full: bool = False) -> RenderableType:
    """Of each kernel the whole layouts; with `full`, or where there are no others, their parts as well."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for code, layouts in kernels:
        body: list[RenderableType] = []
        drawn = [layout for layout in layouts if full or is_whole(layout)] or list(layouts)
        for layout in drawn:
            body += [Text(summary(layout)), *([_drawn(layout.where)] if layout.where else []), Text("")]
        if rest := [f"{each.name} {'x'.join(map(str, each.shape))}" for each in layouts if each not in drawn]:
            body.append(tables.note(f"parts of these, which --full draws: {', '.join(rest)}"))
        if not layouts:
            body = [Text("Triton gives its tensors no layout: it has none, or none is at hand")]
        parts.append(tables.titled(f"{code.name} on {code.gpu.key}", *body))
    return Group(*parts)


def _drawn(where: Spread | Shared) -> RenderableType:
    from rich.text import Text

    lines = grid(where)
    out = Text()
    for line in lines[:LINES]:
        out.append("  ")
        for element in line[:CELLS]:
            style = ""
            if isinstance(where, Spread):
                style = STYLES[where.holders[element][0][0] % len(STYLES)]
            out.append(f"{label(where, element):>5} ", style=style)
        out.append(f" … {len(line) - CELLS} more\n" if len(line) > CELLS else "\n", style="dim")
    if len(lines) > LINES:
        out.append(f"  … {len(lines) - LINES} lines more\n", style="dim")
    out.rstrip()
    return out


def to_json(kernels: Sequence[tuple[Code, Sequence[Layout]]]) -> dict[str, Any]:
    rows = []
    for code, layouts in kernels:
        for layout in layouts:
            row: dict[str, Any] = {
                "kernel": code.name, "gpu": code.gpu.key, "layout": layout.name, "text": layout.text,
                "shape": list(layout.shape), "dtype": layout.dtype,
            }  # fmt: skip
            if isinstance(layout.where, Spread):
                row |= {"register": layout.where.register, "lane": layout.where.lane, "warp": layout.where.warp}
            elif layout.where:
                row["offsets"] = [layout.where.offsets[at] for at in sorted(layout.where.offsets)]
            else:
                row["unavailable"] = layout.why_not
            rows.append(row)
    return {"layouts": rows}


def document(kernels: Sequence[tuple[Code, Sequence[Layout]]]) -> str:
    """One self-contained page."""
    body = []
    for code, layouts in kernels:
        body.append(f"<h2>{escape(code.name)} on {escape(code.gpu.key)}</h2>")
        for layout in layouts:
            body.append(f"<p>{escape(summary(layout))}<br><code>{escape(layout.text)}</code></p>")
            if layout.where:
                body.append(f'<div style="overflow-x:auto">{svg(layout.where)}</div>')
    return html_page.document("Which lane holds which element", LEAD, *body)


def svg(where: Spread | Shared) -> str:
    lines = grid(where)
    shown = [line[:HTML_CELLS] for line in lines[:HTML_LINES]]
    wide, tall = 44, 22
    width, height = wide * max(map(len, shown)), tall * len(shown)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 20}" font-size="11" '
             'font-family="ui-monospace,monospace" text-anchor="middle">']  # fmt: skip
    for y, line in enumerate(shown):
        for x, element in enumerate(line):
            colour = where.holders[element][0][0] if isinstance(where, Spread) else where.bank(element) // 4
            parts.append(
                f"<g><title>{escape(_title(where, element))}</title>"
                f'<rect x="{x * wide}" y="{y * tall}" width="{wide - 1}" height="{tall - 1}" '
                f'fill="{SHADES[colour % len(SHADES)]}"/>'
                f'<text x="{x * wide + wide // 2}" y="{y * tall + 15}" fill="#1f2328">'
                f"{label(where, element)}</text></g>"
            )
    rest = sum(map(len, lines)) - sum(map(len, shown))
    if rest:
        parts.append(f'<text x="4" y="{height + 15}" text-anchor="start" fill="#8b949e">{rest} cells more</text>')
    return "".join([*parts, "</svg>"])


def _title(where: Spread | Shared, element: tuple[int, ...]) -> str:
    first = f"element {', '.join(map(str, element))}"
    if isinstance(where, Shared):
        return f"{first}: bank {where.bank(element)}, offset {where.offsets[element]}"
    holders = [f"warp {warp} lane {lane} register {register}" for warp, lane, register in where.holders[element][:4]]
    more = len(where.holders[element]) - len(holders)
    return f"{first}: {'; '.join(holders)}{f'; {more} more' if more else ''}"
