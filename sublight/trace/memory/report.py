"""What a run's memory went to: the peak, what was live then, how it came there, and what would lower it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sublight import units
from sublight.errors import BadInput
from sublight.trace.memory import advice as memory_advice
from sublight.trace.memory import log as memory_log
from sublight.trace.memory import snapshot, snapshot_replay
from sublight.trace.memory.advice import Advice
from sublight.trace.memory.ledger import CATEGORIES, Ledger, decimate
from sublight.trace.memory.stacks import Site
from sublight.trace.record import NONE, Mask, Trace

MODULES = 5  # curves of their own; the others share one
OUTSIDE = "outside modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """What one place held at the peak."""

    name: str  # the function, the op or the module
    source: str  # "train.py:41", or ""
    category: str  # of CATEGORIES
    bytes: int
    count: int

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "source", "category", "bytes", "count")}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Everything that the report shows of one device."""

    source: str
    device: str
    peak_bytes: int
    peak_time_s: float  # from the first event
    duration_s: float
    reserved_peak_bytes: int | None
    reserved_at_peak_bytes: int | None
    stuck_bytes: int | None  # of it, in segments used in part; None: where segments lie is not known
    cached_bytes: int  # of it, in segments that nothing uses
    times_s: tuple[float, ...]  # of the timeline, thinned but with every extreme that shows
    live_bytes: tuple[int, ...]
    by_category: Mapping[str, tuple[int, ...]]  # they add up to live_bytes
    by_module: Mapping[str, tuple[int, ...]]  # likewise
    categories: Mapping[str, int]  # at the peak
    rows: tuple[MemoryRow, ...]  # at the peak, by bytes, largest first; they add up to peak_bytes
    modules: tuple[MemoryRow, ...]  # the same by module
    steps: int
    advice: tuple[Advice, ...]
    notes: tuple[str, ...] = ()

    @property
    def fragmentation_bytes(self) -> int | None:
        """Reserved but not live at the peak."""
        return None if self.reserved_at_peak_bytes is None else max(0, self.reserved_at_peak_bytes - self.peak_bytes)

    def to_json(self) -> dict[str, Any]:
        head = ("source", "device", "peak_bytes", "peak_time_s", "duration_s", "reserved_peak_bytes")
        more = ("reserved_at_peak_bytes", "fragmentation_bytes", "stuck_bytes", "cached_bytes", "steps")
        return {
            **{name: getattr(self, name) for name in (*head, *more)},
            "timeline": {
                "times_s": list(self.times_s),
                "bytes": list(self.live_bytes),
                "by_category": {name: list(curve) for name, curve in self.by_category.items()},
                "by_module": {name: list(curve) for name, curve in self.by_module.items()},
            },
            "categories": dict(self.categories),
            "rows": [row.to_json() for row in self.rows],
            "modules": [row.to_json() for row in self.modules],
            "advice": [each.to_json() for each in self.advice],
            "notes": list(self.notes),
        }


def read(path: Path, device: int | None = None) -> MemoryReport:
    """A report from a file: a memory snapshot as a pickle or JSON, or else a trace with allocator events."""
    if snapshot.looks_like(snapshot.head_of(path)):
        return from_snapshot(snapshot.load(path), device)
    from sublight.trace.read import chrome

    return from_trace(chrome.load(path), device)


def from_snapshot(found: snapshot.Snapshot, device: int | None = None) -> MemoryReport:
    """The device with the highest peak by default."""
    return _chosen(snapshot_replay.ledgers(found), device)


def from_trace(trace: Trace, device: int | None = None) -> MemoryReport:
    """The GPU with the highest peak by default; the host's memory where no GPU's was recorded."""
    found = memory_log.ledgers(trace)
    gpus = {index: ledger for index, ledger in found.items() if index != NONE}
    return _chosen(gpus or found, device)


def _chosen(ledgers: Mapping[int, Ledger], device: int | None) -> MemoryReport:
    peaks = {index: int(ledger.live_bytes.max(initial=0)) for index, ledger in ledgers.items()}
    chosen = max(peaks, key=lambda index: peaks[index]) if device is None else device
    if chosen not in ledgers:
        raise BadInput(f"nothing was recorded of device {device}: there are {', '.join(map(str, sorted(ledgers)))}")
    others = [f"device {index} peaked at {units.text(peak, 'B')}" for index, peak in peaks.items() if index != chosen]
    return report(ledgers[chosen], notes=("; ".join(others),) if others else ())


def report(ledger: Ledger, *, notes: Sequence[str] = ()) -> MemoryReport:
    """All figures of one device."""
    if not len(ledger.bytes):
        raise BadInput(f"{ledger.source}: nothing was allocated on {ledger.device} while it was recorded")
    live, reserved = ledger.live_bytes, ledger.reserved_bytes
    points = decimate(live)
    at_peak = ledger.live_at(ledger.peak)
    categories = {name: int(ledger.bytes[at_peak & ledger.category_mask(name)].sum()) for name in CATEGORIES}
    modules = _rows(ledger, at_peak, lambda site: (site.module or OUTSIDE, ""))
    shown = [row.name for row in modules[:MODULES]]
    return MemoryReport(
        source=ledger.source,
        device=ledger.device,
        peak_bytes=int(live.max()),
        peak_time_s=float(ledger.times_s[ledger.peak] - ledger.times_s[0]),
        duration_s=float(ledger.times_s[-1] - ledger.times_s[0]),
        reserved_peak_bytes=None if reserved is None else int(reserved.max()),
        reserved_at_peak_bytes=None if reserved is None else int(reserved[ledger.peak]),
        stuck_bytes=ledger.stuck_bytes,
        cached_bytes=ledger.cached_bytes,
        times_s=tuple((ledger.times_s[points] - ledger.times_s[0]).tolist()),
        live_bytes=tuple(live[points].tolist()),
        by_category={
            name: tuple(ledger.curve(mask)[points].tolist())
            for name in CATEGORIES
            if (mask := ledger.category_mask(name)).any()
        },
        by_module=_module_curves(ledger, shown, points),
        categories={name: size for name, size in categories.items() if size},
        rows=_rows(ledger, at_peak, lambda site: (site.name, site.source)),
        modules=modules,
        steps=len(ledger.steps),
        advice=memory_advice.advise(ledger),
        notes=(*notes, *ledger.notes, *_notes(ledger)),
    )


def _rows(ledger: Ledger, chosen: Mask, key: Callable[[Site], tuple[str, str]]) -> tuple[MemoryRow, ...]:
    """One row a place; the category is the one that most of its bytes have."""
    rows = []
    for name, group in ledger.grouped(chosen, key):
        assert isinstance(name, tuple)
        shares = np.bincount(ledger.category[group], weights=ledger.bytes[group], minlength=len(CATEGORIES))
        rows.append(
            MemoryRow(
                name=name[0],
                source=name[1],
                category=CATEGORIES[int(shares.argmax())],
                bytes=int(ledger.bytes[group].sum()),
                count=len(group),
            )
        )
    return tuple(rows)


def _module_curves(ledger: Ledger, shown: Sequence[str], points: Any) -> dict[str, tuple[int, ...]]:
    names = [site.module or OUTSIDE for site in ledger.sites]
    curves = {}
    rest = np.ones(len(ledger.bytes), dtype=bool)
    for module in shown:
        mask = np.array([name == module for name in names])[ledger.site]
        rest &= ~mask
        curves[module] = tuple(ledger.curve(mask)[points].tolist())
    if rest.any():
        curves["other modules"] = tuple(ledger.curve(rest)[points].tolist())
    return curves


def _notes(ledger: Ledger) -> list[str]:
    notes = ["categories are a guess from the stacks: which part of a step made a block, and how long it lived"]
    steps = ledger.steps
    if len(steps) >= 3:  # the first makes the optimizer's state, and is not like the others
        spans = [ledger.live_bytes[begin:end] for begin, end in itertools.pairwise(steps[1:].tolist())]
        low, high = (int(np.median([edge(span) for span in spans])) for edge in (np.min, np.max))
        notes.append(f"{len(steps)} steps: a usual one goes from {units.text(low, 'B')} to {units.text(high, 'B')}")
    for time_s, size in ledger.oom[:3]:
        when = units.text(time_s - float(ledger.times_s[0]), "s")
        notes.append(f"out of memory at {when}: an allocation of {units.text(size, 'B')} failed")
    return notes
