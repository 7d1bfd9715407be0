"""Whether the programs of a launch write all of an output, told from some of them.

Each of those that ran wrote so many elements; as many programs as the launch has write that many times more. Where all
write the same number, as nearly always, one program that is missing shows; where they differ, the spread says how far
chance may have led astray.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SURE = 4.0  # standard errors: chance alone goes so far once in 30,000 checks


def left_out(name: str, distinct: int, wanted: int, launches: Sequence[Mapping[str, float]]) -> str:
    """What is wrong; empty where enough is written. `distinct` elements were written by all that ran: an element that
    is stored twice counts once. Of each launch: `total` programs, `ran`, and the sums of their `stored` and its
    `squares`.

    >>> left_out("out", 12 * 1024, 16 * 1024, [{"total": 16, "ran": 12, "stored": 12288, "squares": 12 * 1024**2}])
    ''
    >>> left_out("out", 12 * 1024, 16 * 1024, [{"total": 15, "ran": 12, "stored": 12288, "squares": 12 * 1024**2}])
    'at this size its programs write 15,360 of the 16,384 elements of out: the rest is left out'
    """
    stored = sum(each["stored"] for each in launches)
    if not distinct or not stored:
        return f"at this size those of its programs that ran, drawn by chance, write nothing to {name}"
    expected = variance = 0.0
    for each in launches:
        total, ran = each["total"], each["ran"]
        mean = each["stored"] / ran
        spread = max(0.0, each["squares"] / ran - mean * mean) / max(1, ran - 1) * (1 - ran / total)
        expected += mean * total
        variance += spread * total * total
    once = min(1.0, distinct / stored)
    if (expected + SURE * math.sqrt(variance)) * once >= wanted:
        return ""
    return (
        f"at this size its programs write {expected * once:,.0f} of the {wanted:,} elements of {name}: "
        "the rest is left out"
    )
