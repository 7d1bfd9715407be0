"""What the page of `xray` shows of one kernel on one GPU: plain rows, each of which may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sublight.xray.record import Access, Code, Finding, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class OccupancyRow:
    """One choice of block size, and what an SM holds of it."""

    warps: int  # of a block
    blocks_per_sm: int
    occupancy: float  # warps on an SM / warps that it can hold
    limited_by: str
    is_now: bool = False  # the kernel as it was compiled
    is_best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixRow:
    """The instructions of one loop (without the loops inside it), or of what lies outside all loops."""

    name: str  # "loop at line 61", "outside loops"
    counts: Mapping[str, float]  # kind -> instructions of a warp, an iteration; see xray_tables.GROUPS
    place: Place | None = None
    depth: int = 0
    issue_cycles: float | None = None  # an iteration cannot issue in fewer
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoofRow:
    """A time that something allows, or that was measured."""

    name: str  # floor, occupancy, issue, transactions, measured
    seconds: float | None
    kind: Literal["floor", "allows", "measured"] = "allows"
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelView:
    """One kernel on one GPU; the page leaves out what is not given."""

    code: Code
    blocks_per_sm: int | None = None
    occupancy: float | None = None
    limited_by: str = ""
    tensor_core: str | None = None  # HGMMA; empty: none are used; None: not looked at
    findings: tuple[Finding, ...] = ()
    accesses: tuple[Access, ...] = ()
    occupancy_rows: tuple[OccupancyRow, ...] = ()
    mix: tuple[MixRow, ...] = ()
    roof: tuple[RoofRow, ...] = ()
    heat: Mapping[int, float] = field(default_factory=dict)  # source line -> weight; empty: its SASS instructions
    source: str | None = None  # None: read from the code's file
    is_whole: bool = True  # all of its addresses are known: where nothing was found, nothing is there
    notes: tuple[str, ...] = ()
