"""Measured corrections on a grid over the logarithms of a shape, interpolated linearly between its nodes.

A node's value is the logarithm of measured over analytic time: 0 where nothing was measured nearby. Outside the grid
the nearest edge counts.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FEW_BITS = "product few bits"  # than 16, of which there is no table


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Corrections of one kind of op on one GPU."""

    gpu: str
    architecture: str
    kind: str
    axes: tuple[tuple[float, ...], ...]  # of log2 of each size
    values: tuple[float, ...]  # row by row, the last axis fastest
    median_error: float  # of the rows that were held out
    p90_error: float
    rows: int
    source: str
    parameters: Mapping[str, float] | None = None  # of the analytic model, where they were fitted to this GPU's rows

    def correction(self, sizes: Sequence[float]) -> float:
        """The factor by which the analytic time is multiplied."""
        return math.exp(interpolate(self.axes, self.values, [math.log2(size) for size in sizes]))


def corners(axes: Sequence[Sequence[float]], point: Sequence[float]) -> list[tuple[int, float]]:
    """The nodes around a point and their weights, which add up to 1.

    >>> corners([(0.0, 2.0), (0.0, 1.0)], [1.0, 0.25])
    [(0, 0.375), (1, 0.125), (2, 0.375), (3, 0.125)]
    """
    sides = []
    for axis, at in zip(axes, point, strict=True):
        place = min(max(at, axis[0]), axis[-1])
        left = min(max(bisect.bisect_right(axis, place) - 1, 0), len(axis) - 2)
        share = (place - axis[left]) / (axis[left + 1] - axis[left])
        sides.append(((left, 1 - share), (left + 1, share)))
    found = []
    for chosen in itertools.product(*sides):
        index = 0
        for (node, _), axis in zip(chosen, axes, strict=True):
            index = index * len(axis) + node
        found.append((index, math.prod(weight for _, weight in chosen)))
    return found


def interpolate(axes: Sequence[Sequence[float]], values: Sequence[float], point: Sequence[float]) -> float:
    return sum(values[index] * weight for index, weight in corners(axes, point) if weight)


@functools.cache
def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("efficiency.json").read_text(encoding="utf-8"))
    return found


@functools.cache
def parameters(kind: str) -> dict[str, float]:
    """The parameters of the analytic model for this kind of op."""
    return dict(_fitted(kind)["parameters"])


@functools.cache
def analytic_error(kind: str, gpu: str = "") -> float:
    """The 90th percentile of the analytic model's relative error: on that GPU where it was checked there, else the
    median of those that it was checked on; a half where it never was."""
    fitted = _fitted(kind)
    return float(fitted.get("p90_of", {}).get(gpu, fitted.get("p90_error", 0.5)))


def _fitted(kind: str) -> dict[str, Any]:
    of_kind = {"product int4": FEW_BITS}.get(kind, kind)
    found: dict[str, Any] = data()["analytic"]["stream" if kind.startswith("stream ") else of_kind]
    return found


@functools.cache
def tables() -> tuple[Table, ...]:
    return tuple(of_json(row) for row in data()["tables"])


def of_json(row: dict[str, Any]) -> Table:
    return Table(**{**row, "axes": tuple(map(tuple, row["axes"])), "values": tuple(row["values"])})


def find(kind: str, gpu: str, architecture: str | None, own: Sequence[Table] = ()) -> Table | None:
    """The machine's own, or the table of that GPU, else of one with the same architecture.

    An own one of "stream" stands for every memory-bound op that was not measured there.
    """
    wanted = (kind, "stream") if kind.startswith("stream ") else (kind,)
    if mine := next((table for name in wanted for table in own if table.kind == name), None):
        return mine
    fitting = [table for table in tables() if table.kind == kind]
    return next(
        (table for table in fitting if table.gpu == gpu),
        next((table for table in fitting if architecture and table.architecture == architecture), None),
    )
