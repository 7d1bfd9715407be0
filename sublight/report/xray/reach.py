"""Where the lanes of a warp go, drawn as memory: a line is 128 bytes, the 32 banks of shared memory or four sectors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from sublight.report.draw import page as html_page
from sublight.report.draw import tables
from sublight.xray.ptx.reach import Reach, Reached

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sublight.xray.record import Code

LINE_BYTES, WORD_BYTES = 128, 4
LINES, HTML_LINES = 8, 40  # of an instruction
STYLES = ("cyan", "magenta", "green", "yellow")  # eight lanes each
SHADES = ("#bfe3f7", "#f6cfe6", "#cdeccb", "#f9e6b3")
LEAD = (
    "A line is 128 bytes of memory in words of 4, each named by the lane that asks for it: of shared memory the 32 "
    "banks stand under one another, of global memory every eight words are a sector. ** is asked for by several lanes."
)
Lines = dict[int, list[list[int]]]  # first byte of a line -> of each of its words, the lanes


def lines_of(reach: Reach) -> Lines:
    """Every line of memory that a lane touches.

    >>> from sublight.xray.ptx.reach import Reach
    >>> reach = Reach(place=None, instruction="ld", space="global", kind="load", width=8, offsets=(0, 120, None))
    >>> {first: [(word, *lanes) for word, lanes in enumerate(line) if lanes] for first, line in lines_of(reach).items()}
    {0: [(0, 0), (1, 0), (30, 1), (31, 1)]}
    """
    lines: Lines = {}
    for lane, offset in enumerate(reach.offsets):
        if offset is None:
            continue
        for word in range(offset // WORD_BYTES, (offset + max(reach.width, 1) - 1) // WORD_BYTES + 1):
            first, at = word * WORD_BYTES // LINE_BYTES * LINE_BYTES, word % (LINE_BYTES // WORD_BYTES)
            lines.setdefault(first, [[] for _ in range(LINE_BYTES // WORD_BYTES)])[at].append(lane)
    return dict(sorted(lines.items()))


def pattern(reach: Reach) -> str:
    """How lanes lie to one another, in words.

    >>> from sublight.xray.ptx.reach import Reach
    >>> load = Reach(place=None, instruction="ld", space="global", kind="load", width=4)
    >>> for offsets in ((8, 8, None), (0, 4, 8), (0, 64, 128), (0, 4, 32)):
    ...     print(pattern(dataclasses.replace(load, offsets=offsets)))
    all at the same place
    side by side
    each lane 64 bytes behind the last
    in several stretches
    """
    places = [(lane, offset) for lane, offset in enumerate(reach.offsets) if offset is not None]
    if len({offset for _, offset in places}) == 1:
        return "all at the same place" if len(places) > 1 else "one lane alone"
    steps = {(after[1] - before[1], after[0] - before[0]) for before, after in itertools.pairwise(places)}
    if len(steps) == 1 and (only := steps.pop())[1] == 1:
        if only[0] == reach.width:
            return "side by side"
        return f"each lane {abs(only[0])} bytes {'behind' if only[0] > 0 else 'before'} the last"
    return "in several stretches"


def grouped(instructions: Sequence[Reach]) -> list[tuple[Reach, int]]:
    """The first of those of a line that differ only in where they begin, as an unrolled loop has them; how many."""
    groups: dict[object, list[Reach]] = {}
    for reach in instructions:
        begin = min((offset for offset in reach.offsets if offset is not None), default=0)
        shape = tuple(None if offset is None else offset - begin for offset in reach.offsets)
        key = (reach.place, reach.instruction, reach.space, reach.argument, reach.unknown, shape)
        groups.setdefault(key, []).append(reach)
    return [(alike[0], len(alike)) for alike in groups.values()]


def summary(reach: Reach, count: int = 1) -> str:
    """transpose.cu:21: shared store of 4 bytes, warp 0: side by side (4 such)"""
    where = f"{reach.place.file.rpartition('/')[2]}:{reach.place.line}: " if reach.place else ""
    what = f"{where}{reach.space} {reach.kind}{f' of {reach.width} bytes' if reach.width else ''} ({reach.instruction})"
    if reach.unknown:
        return f"{what}: not known: {reach.unknown}"
    took_part = sum(offset is not None for offset in reach.offsets)
    some = "" if took_part == len(reach.offsets) else f", {took_part} of {len(reach.offsets)} lanes"
    whose = f" in argument {reach.argument}" if reach.argument else ""
    such = f" ({count} such)" if count > 1 else ""
    return f"{what}{whose}, warp {reach.warp}{some}: {pattern(reach)}{such}"


def page(kernels: Sequence[tuple[Code, Reached]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for code, reached in kernels:
        body: list[RenderableType] = []
        for reach, count in grouped(reached.instructions):
            body += [Text(summary(reach, count)), *([_drawn(reach)] if reach.offsets else []), Text("")]
        body += [Text(words) for words in notes(reached)]
        parts.append(tables.titled(f"{code.name} on {code.gpu.key}", *body))
    return Group(*parts)


def notes(reached: Reached) -> list[str]:
    """What is not drawn, and why."""
    if reached.stopped:
        return [f"What comes after is not drawn: the block could not be followed to its end: {reached.stopped}"]
    return [] if reached.instructions else ["The block that was followed comes to no memory instruction."]


def _drawn(reach: Reach) -> RenderableType:
    from rich.text import Text

    out = Text(no_wrap=True)
    lines = lines_of(reach)
    for first, words in list(lines.items())[:LINES]:
        out.append(f"{f'+{first}':>10} ", style="dim")
        for lanes in words:
            style = STYLES[lanes[0] // 8 % len(STYLES)] + (" bold" if lanes[0] % 2 else "") if lanes else "dim"
            out.append(label(lanes), style=style)
        out.append("\n")
    if len(lines) > LINES:
        out.append(f"  … {len(lines) - LINES} lines more\n", style="dim")
    out.rstrip()
    return out


def label(lanes: Sequence[int]) -> str:
    """
    >>> label([]), label([7]), label([7, 8])
    ('··', '07', '**')
    """
    return "··" if not lanes else f"{lanes[0]:02d}" if len(lanes) == 1 else "**"


def to_json(kernels: Sequence[tuple[Code, Reached]]) -> dict[str, Any]:
    rows = [
        {"kernel": code.name, "gpu": code.gpu.key, **dataclasses.asdict(reach)}
        for code, reached in kernels
        for reach in reached.instructions
    ]
    return {"instructions": rows, "notes": [words for _, reached in kernels for words in notes(reached)]}


def document(kernels: Sequence[tuple[Code, Reached]]) -> str:
    """One self-contained page."""
    body = []
    for code, reached in kernels:
        body.append(f"<h2>{escape(code.name)} on {escape(code.gpu.key)}</h2>")
        for reach, count in grouped(reached.instructions):
            body.append(f"<p>{escape(summary(reach, count))}</p>")
            if reach.offsets:
                body.append(f'<div style="overflow-x:auto">{svg(reach)}</div>')
        body += [f"<p>{escape(words)}</p>" for words in notes(reached)]
    return html_page.document("Where the lanes of a warp go", LEAD, *body)


def svg(reach: Reach) -> str:
    lines = lines_of(reach)
    shown = list(lines.items())[:HTML_LINES]
    wide, tall, left = 24, 20, 80
    width, height = left + wide * LINE_BYTES // WORD_BYTES, tall * len(shown)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 20}" font-size="11" '
             'font-family="ui-monospace,monospace" text-anchor="middle">']  # fmt: skip
    for y, (first, words) in enumerate(shown):
        parts.append(f'<text x="{left - 8}" y="{y * tall + 14}" text-anchor="end" fill="#8b949e">+{first}</text>')
        for at, lanes in enumerate(words):
            fill = SHADES[lanes[0] // 8 % len(SHADES)] if lanes else "#f0f2f4"
            text = label(lanes) if lanes else ""
            parts.append(
                f"<g><title>{escape(_title(reach, first, at, lanes))}</title>"
                f'<rect x="{left + at * wide}" y="{y * tall}" width="{wide - 1}" height="{tall - 1}" fill="{fill}"/>'
                f'<text x="{left + at * wide + wide // 2}" y="{y * tall + 14}" fill="#1f2328">{text}</text></g>'
            )
    if rest := len(lines) - len(shown):
        parts.append(f'<text x="4" y="{height + 15}" text-anchor="start" fill="#8b949e">{rest} lines more</text>')
    return "".join([*parts, "</svg>"])


def _title(reach: Reach, first: int, at: int, lanes: Sequence[int]) -> str:
    where = f"bank {at}" if reach.space == "shared" else f"sector {at // 8}"
    who = f"lane {', '.join(map(str, lanes))}" if lanes else "no lane"
    return f"byte {first + at * WORD_BYTES}, {where}: {who}"
