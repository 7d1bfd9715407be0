"""Intervals of whole numbers against sets of the units that they cover."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublight.trace import intervals
from sublight.trace.intervals import Intervals

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def made(pairs: list[tuple[int, int]]) -> Intervals:
    return intervals.union([start for start, _ in pairs], [end for _, end in pairs])


def units(pairs: list[tuple[int, int]]) -> set[int]:
    return {unit for start, end in pairs for unit in range(start, end)}


def same(found: Intervals, wanted: set[int]) -> None:
    edges = found.reshape(-1)
    assert (np.diff(edges) > 0).all(), "sorted, apart, none empty"
    assert units([(int(start), int(end)) for start, end in found.tolist()]) == wanted
    assert intervals.length(found) == len(wanted)


@given(spans)
def test_union(pairs: list[tuple[int, int]]) -> None:
    same(made(pairs), units(pairs))


@given(spans, st.integers(0, 40), st.integers(0, 40))
def test_clip_and_complement(pairs: list[tuple[int, int]], start: int, length: int) -> None:
    window = set(range(start, start + length))
    same(intervals.clip(made(pairs), start, start + length), units(pairs) & window)
    same(intervals.complement(made(pairs), start, start + length), window - units(pairs))


@pytest.mark.parametrize(("found", "wanted"), [(intervals.intersect, set.__and__), (intervals.subtract, set.__sub__)])
@given(one=spans, other=spans)
def test_intersect_and_subtract(
    found: Callable[[Intervals, Intervals], Intervals],
    wanted: Callable[[set[int], set[int]], set[int]],
    one: list[tuple[int, int]],
    other: list[tuple[int, int]],
) -> None:
    same(found(made(one), made(other)), wanted(units(one), units(other)))


@given(spans, spans)
def test_overlaps(pairs: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    asked = [(min(pair), max(pair)) for pair in asked]
    start, end = (np.array([pair[side] for pair in asked], dtype=np.float64) for side in (0, 1))
    wanted = [len(units(pairs) & set(range(*pair))) for pair in asked]
    assert intervals.overlaps(start, end, made(pairs)).tolist() == wanted
