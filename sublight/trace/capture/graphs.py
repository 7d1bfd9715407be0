"""What the kernels of a CUDA graph stand for: a graph's replay names no op, but its warm-up ran the same kernels.

The profile of a run's beginning holds that warm-up: each kernel, by its name and grid, with the op that launched it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sublight.errors import BadInput
from sublight.trace.attribute import GRAPH_LAUNCHES, attribute, kernel_key
from sublight.trace.read import chrome
from sublight.trace.record import NONE, Kind

MOST = 4000  # kernels
PIECE_BYTES, LONGEST = 1 << 22, max(map(len, GRAPH_LAUNCHES))
MOST_BYTES = 400 << 20  # of the profile: more is not worth a user's wait


def replays(window: Path) -> bool:
    """Whether a profile replays a graph."""
    before = b""
    with window.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            text = before + piece
            if any(name.encode() in text for name in GRAPH_LAUNCHES):
                return True
            before = piece[-LONGEST:]  # a name may lie across two pieces
    return False


def ops_of_kernels(first: Path) -> dict[str, Any]:
    """By kernel: the op and its arguments, of the op's longest kernel; {} where the profile cannot be read."""
    if first.stat().st_size > MOST_BYTES:
        return {}
    try:
        trace = chrome.load(first)
    except BadInput:
        return {}
    found = attribute(trace)
    longest: dict[int, int] = {}
    for row in trace.of_kind(Kind.KERNEL).tolist():
        op = int(found.op[row])
        length = trace.end_ns[row] - trace.start_ns[row]
        if op != NONE and (op not in longest or length > trace.end_ns[longest[op]] - trace.start_ns[longest[op]]):
            longest[op] = row
    by_kernel: dict[str, Any] = {}
    for row in longest.values():
        if len(by_kernel) < MOST:
            names = [trace.name_of(above) for above in found.ops_above(row)]
            details = [trace.detail_of(above) for above in found.ops_above(row)]
            by_kernel[kernel_key(trace, row)] = [
                [name, msgspec.to_builtins(detail)] for name, detail in zip(names, details, strict=True)
            ]
    return by_kernel
