"""Whether the programs of a launch write all of an output, told from some of them.

Each of those that ran wrote so many elements; as many programs as the launch has write that many times more. Where all
write the same number, as nearly always, one program that is missing shows; where they differ, the spread says how far
chance may have led astray. And no program writes more than the largest count: what programs that ran fall short of it
must fit into what all together have to spare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

SURE = 4.0  # standard errors: chance alone goes so far once in 30,000 checks


def left_out(name: str, distinct: int, wanted: int, launches: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong; empty where enough is written. Those that ran have written `distinct` elements: one that is stored
    twice counts once. Of each launch: its `total` of programs, and the `counts` of elements that each one stored.

    >>> left_out("out", 12 * 1024, 16 * 1024, [{"total": 16, "counts": [1024] * 12}])
    ''
    >>> left_out("out", 12 * 1024, 16 * 1024, [{"total": 15, "counts": [1024] * 12}])
    'at this size its programs write about 15,360 of the 16,384 elements of out: the rest is left out'
    >>> left_out("out", 11 * 1024, 16 * 1024, [{"total": 16, "counts": [1024] * 11 + [0]}])
    'at this size some of its programs write less than their share of out: the rest is left out'
    """
    stored = sum(sum(each["counts"]) for each in launches)
    if not distinct or not stored:
        return f"at this size those of its programs that ran, drawn by chance, write nothing to {name}"
    expected = variance = 0.0
    once = min(1.0, distinct / stored)
    for each in launches:
        total, counts = each["total"], each["counts"]
        mean = sum(counts) / len(counts)
        spread = sum((count - mean) ** 2 for count in counts) / max(1, len(counts) - 1) / len(counts)
        expected += mean * total * once
        variance += spread * (total * once) ** 2
    if expected + SURE * math.sqrt(variance) < wanted:
        return f"at this size its programs write about {expected:,.0f} of the {wanted:,} elements of {name}: {_REST}"
    if len(launches) == 1:
        total, counts = launches[0]["total"], launches[0]["counts"]
        spare = total * max(counts) * once - wanted
        if sum(max(counts) - count for count in counts) * once > max(0.0, spare):
            return f"at this size some of its programs write less than their share of {name}: {_REST}"
    return ""


def filled(name: str, distinct: int, launches: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong where more elements are written than kernels have stored; empty where it is not so.

    >>> filled("out", 1024, [{"total": 16, "counts": [1024]}]), filled("out", 0, [])
    ('', '')
    >>> filled("out", 16384, [{"total": 16, "counts": [1024]}])[:50]
    'out is filled (zero_) before a kernel stores to it'
    """
    stored = sum(sum(each["counts"]) for each in launches)
    if not 0 < stored < distinct:
        return ""
    why = "that takes a GPU as long as a kernel does, and a kernel that stores each element once does not need it"
    return f"{name} is filled (zero_) before a kernel stores to it: {why}"


_REST = "the rest is left out"
