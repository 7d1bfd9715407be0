"""Sets of time as sorted, disjoint intervals: unions, not sums."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T", bound=np.generic)
Floats = npt.NDArray[np.float64]
Intervals = npt.NDArray[np.float64]  # (n, 2): starts and ends, sorted, disjoint


def union(start: npt.ArrayLike, end: npt.ArrayLike) -> Intervals:
    """
    >>> union([0, 5, 1], [2, 6, 3]).tolist()
    [[0.0, 3.0], [5.0, 6.0]]
    """
    first, last = np.asarray(start, dtype=np.float64), np.asarray(end, dtype=np.float64)
    real = last > first
    first, last = first[real], last[real]
    if not len(first):
        return np.empty((0, 2))
    order = np.argsort(first, kind="stable")
    first, reach = first[order], np.maximum.accumulate(last[order])
    opens = np.concatenate(([True], first[1:] > reach[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return np.stack((first[opens], reach[closes]), axis=1)


def middle(values: npt.ArrayLike) -> float:
    """The median. (numpy's own imports masked arrays first, which takes longer than to read a small trace.)

    >>> middle([3, 1, 2]), middle([4.0, 1.0])
    (2.0, 2.5)
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def distinct(values: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """Each value once, in order. (As above: numpy's `unique` imports masked arrays.)

    >>> distinct(np.array([3, 1, 3])).tolist(), distinct(np.array([])).tolist()
    ([1, 3], [])
    """
    ordered = np.sort(values, axis=None)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(ordered)]]


def length(intervals: Intervals) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def clip(intervals: Intervals, start: float, end: float) -> Intervals:
    """
    >>> clip(union([0, 5], [2, 9]), 1, 6).tolist()
    [[1.0, 2.0], [5.0, 6.0]]
    """
    cut = np.clip(intervals, start, end)
    kept: Intervals = cut[cut[:, 1] > cut[:, 0]]
    return kept


def complement(intervals: Intervals, start: float, end: float) -> Intervals:
    """What of [start, end] the intervals leave free.

    >>> complement(union([1, 5], [2, 9]), 0, 6).tolist()
    [[0.0, 1.0], [2.0, 5.0]]
    """
    inside = clip(intervals, start, end)
    free = np.stack((np.concatenate(([start], inside[:, 1])), np.concatenate((inside[:, 0], [end]))), axis=1)
    kept: Intervals = free[free[:, 1] > free[:, 0]]
    return kept


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """
    >>> intersect(union([0, 5], [3, 9]), union([2], [6])).tolist()
    [[2.0, 3.0], [5.0, 6.0]]
    """
    if not len(one) or not len(other):
        return np.empty((0, 2))
    low, high = min(one[0, 0], other[0, 0]), max(one[-1, 1], other[-1, 1])
    return complement(union(*np.concatenate((complement(one, low, high), complement(other, low, high))).T), low, high)


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """
    >>> subtract(union([0], [9]), union([2, 5], [3, 6])).tolist()
    [[0.0, 2.0], [3.0, 5.0], [6.0, 9.0]]
    """
    if not len(one) or not len(other):
        return one
    low, high = min(one[0, 0], other[0, 0]), max(one[-1, 1], other[-1, 1])
    return intersect(one, complement(other, low, high))


def contain(intervals: Intervals, points: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which points lie in the intervals, their starts included.

    >>> contain(union([0, 5], [3, 9]), [0, 3, 6]).tolist()
    [True, False, True]
    """
    at = np.asarray(points, dtype=np.float64)
    if not len(intervals):
        return np.zeros(len(at), dtype=bool)
    place = np.searchsorted(intervals[:, 0], at, side="right") - 1
    inside: npt.NDArray[np.bool_] = (place >= 0) & (at < intervals[np.maximum(place, 0), 1])
    return inside


def overlaps(points_start: Floats, points_end: Floats, intervals: Intervals) -> Floats:
    """How much of each span lies in the intervals, each span for itself.

    >>> overlaps(np.array([0.0, 4.0]), np.array([3.0, 8.0]), union([2, 5], [4.5, 6])).tolist()
    [1.0, 1.5]
    """
    if not len(intervals):
        return np.zeros(len(points_start))
    starts, ends = intervals[:, 0], intervals[:, 1]
    before = np.concatenate(([0.0], np.cumsum(ends - starts)))

    def covered(at: Floats) -> Floats:
        index = np.searchsorted(starts, at, side="right")
        partial = np.where(
            index > 0, np.minimum(at, ends[np.maximum(index - 1, 0)]) - starts[np.maximum(index - 1, 0)], 0.0
        )
        result: Floats = before[np.maximum(index - 1, 0)] + partial
        return result

    result: Floats = covered(points_end) - covered(points_start)
    return result
