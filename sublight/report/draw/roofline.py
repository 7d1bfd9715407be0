"""The roofline of a run: how much arithmetic each op does for a byte, how fast it went, and the roof above it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sublight import units
from sublight.cost import shape_text
from sublight.report import bench
from sublight.results import Result, Run

if TYPE_CHECKING:
    pass

PROVIDERS = ("sublight", "torch", "compile", "liger", "quack")  # by colour; all others share the last colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One timed row."""

    intensity: float  # FLOP per byte of device memory
    rate: float  # FLOP/s
    row: Result

    @property
    def label(self) -> str:
        row = self.row
        case = f"{row.op} {row.direction} {shape_text(row.shape)} {bench.dtype_text(row.dtype)}"
        times = f"{units.text(row.median_s, 's')}, floor {units.text(row.floor_s, 's')}"
        return f"{case}, {row.provider}: {times}, {units.percent(row.fraction)} of the limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """A measured ceiling: bytes/s climb with the intensity, FLOP/s are flat."""

    name: str
    value: float
    flat: bool

    def at(self, intensity: float) -> float:
        return self.value if self.flat else self.value * intensity

    @property
    def label(self) -> str:
        return f"{self.name} {units.text(self.value, 'FLOP/s' if self.flat else 'B/s')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What to draw and the window to draw it in, in FLOP/B and FLOP/s."""

    title: str
    points: tuple[Point, ...]
    roofs: tuple[Roof, ...]
    left_out: int  # timed rows without arithmetic: a roofline cannot show them
    x: tuple[float, float]
    y: tuple[float, float]

    @property
    def providers(self) -> tuple[str, ...]:
        seen = dict.fromkeys(point.row.provider for point in self.points)
        return tuple(sorted(seen, key=lambda name: (colour(name), name)))


def colour(provider: str) -> int:
    return PROVIDERS.index(provider) if provider in PROVIDERS else len(PROVIDERS)


def roofs(run: Run) -> tuple[Roof, ...]:
    """The memory slope and the arithmetic ceilings for the run's data types, as far as they were measured."""
    copy = (
        "hbm_copy" if run.limits.kind == "cuda" else "host_copy"
    )  # each floor has its own mix of reads and writes, near this one
    flat = {"vector_fp32", *(f"matmul_{bench.dtype_text(row.dtype)}" for row in run.rows)}
    drawn = [limit for limit in run.limits.limits if limit.value and limit.name in {copy, *flat}]
    return tuple(Roof(name=limit.name, value=limit.value or 0.0, flat=limit.name != copy) for limit in drawn)


def chart(run: Run) -> Chart | None:
    """The chart; None where no timed row does arithmetic, or no limit is known."""
    timed = [row for row in run.rows if row.median_s]
    points = tuple(
        Point(intensity=row.flops / row.bytes, rate=row.flops / row.median_s, row=row)
        for row in timed
        if row.flops and row.bytes and row.median_s
    )
    ceilings = roofs(run)
    if not points or not ceilings:
        return None
    slopes = [roof for roof in ceilings if not roof.flat]
    flats = [roof for roof in ceilings if roof.flat]
    ridges = [flat.value / slope.value for flat in flats for slope in slopes]
    # as far as the first ridge: with every matrix peak in view, memory-bound ops would crowd in a corner
    right = max(3 * max(point.intensity for point in points), 2 * min(ridges, default=0.0))
    left = min(point.intensity for point in points) / 3
    above = [flat.value for flat in flats if flat.value >= max(point.rate for point in points)]
    top = 3 * min(above) if above else max(roof.at(right) for roof in ceilings)
    bottom = min(point.rate for point in points) / 3
    seen = tuple(roof for roof in ceilings if not roof.flat or bottom < roof.value < top)
    return Chart(
        title=bench.heading(run),
        points=points,
        roofs=seen,
        left_out=len(timed) - len(points),
        x=(left, right),
        y=(bottom, top),
    )


def decades(low: float, high: float) -> list[float]:
    """Powers of ten within the window.

    >>> decades(0.05, 30)
    [0.1, 1.0, 10.0]
    """
    return [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
