"""What `explain` found: a step, where its time goes, the causes, and what each costs. Times in seconds per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sublight.diagnose.source import SourceLine
from sublight.results import Limits
from sublight.trace.record import Trace

BREAKDOWN = {  # every part of a step, in the order of the bar; they add up to step_s
    "floor": "device busy at the floor",
    "fusable": "busy, saved by fusion",
    "above_floor": "busy above the floor",
    "unknown": "busy, cost not known",
    "launch": "idle: host too slow to launch",
    "sync": "idle: host waited on a sync",
    "data": "idle: data loading",
    "python": "idle: other Python",
    "copy": "idle: copies not hidden",
    "allocator": "idle: allocator",
    "communication": "idle: communication not hidden",
    "start_up": "idle: start-up, once",
    "other": "idle: other",
}
BUSY = ("floor", "fusable", "above_floor", "unknown")  # the device at work; the others are idle time
NOT_JUDGED = "not-judged"  # the verdict on a recording of hardly anything
MOSTLY_KNOWN = 0.1  # of the step: with more than this of unknown cost, the step's own floor is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the timeline a finding shows itself."""

    start_s: float  # from the trace's first event
    end_s: float
    label: str = ""


ARGUMENTS = ("num_workers=", "fused=True")  # a fix that has one of these is in one line already


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of headroom."""

    id: str  # "launch-bound"
    title: str  # one sentence that says what happens here, with figures
    saving_s: float  # per step, if this alone were fixed
    evidence: tuple[str, ...]  # what was seen, a line each
    fix: str  # what to change, as code where code says it best
    places: tuple[Place, ...] = ()  # the first ones in the step that is drawn
    ops: tuple[str, ...] = ()  # names of the ops concerned
    cure: str = ""  # the line that has us do it, where one has
    sources: tuple[SourceLine, ...] = ()  # the user's own lines, the most frequent first
    cure_savings_s: Mapping[str, float] = field(default_factory=dict)  # of a cure that does less than the fix, by name

    @property
    def code(self) -> str:
        """The fix, and the line that has us do it where that is another."""
        same = self.cure in self.fix or any(word in self.cure and word in self.fix for word in ARGUMENTS)
        return self.fix if same else f"{self.fix}\n# or, in one line:\n{self.cure}"

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "saving_s": self.saving_s,
            "title": self.title,
            "evidence": list(self.evidence),
            "fix": self.fix,
            "cure": self.cure,
            "cure_saving_s": dict(self.cure_savings_s),
            "places": [{"start_s": place.start_s, "end_s": place.end_s} for place in self.places],
            "ops": list(self.ops),
            "sources": [{"place": line.place, "count": line.count, "share": line.share} for line in self.sources],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """All calls of one op with one shape, data type and place in the model; per step."""

    name: str  # aten::addmm
    family: str  # one of trace.costs.FAMILIES: matmul, conv, attention, norm, pointwise, …
    shape: str  # "4096x1024, 1024x4096", for people
    dtype: str
    module: str  # "Model/layers.3/mlp", or ""
    source: str  # "train.py:41", or ""
    calls: float
    cpu_s: float  # host time inside the op
    device_s: float  # exclusive: overlapping kernels are counted once
    floor_s: float | None  # None: the cost of this op is not known
    bound: str  # "memory", "matmul_bf16", "launch" or ""
    flops: float
    bytes: float
    kernels: tuple[str, ...]  # what really ran

    @property
    def fraction(self) -> float | None:
        """The share of the limit that the op reaches."""
        return self.floor_s / self.device_s if self.floor_s is not None and self.device_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        names = ("name", "family", "shape", "dtype", "module", "source", "calls", "cpu_s", "device_s", "floor_s")
        row = {name: getattr(self, name) for name in (*names, "bound", "flops", "bytes")}
        return {**row, "fraction": self.fraction, "kernels": list(self.kernels)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """A user's range: device time is first kernel's start to last kernel's end, per stream."""

    name: str
    calls: float
    host_s: float
    device_s: float
    streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything that the report shows; drawing reads this and the trace, and measures nothing."""

    source: str  # what was explained: a script's command line, or a file
    device: str  # "NVIDIA H200", or the CPU's name
    kind: str  # "cuda" or "cpu": what the work ran on
    limits: Limits
    limits_from: str  # "measured on this machine 2026-11-15", "known of the NVIDIA H200: reached rates", …
    steps: int
    steps_from: str  # how steps were found: "optimizer steps", "ProfilerStep annotations", …
    step_s: float
    step_spread_s: float  # half the distance between the quartiles over the steps; 0 with one step
    op_floor_s: float  # the ops as written, each at its floor; an op of unknown cost counts as it was measured
    floor_s: float  # after what can be fused is fused
    verdict: str  # a finding's id, "healthy", or NOT_JUDGED
    sentence: str  # the verdict in one sentence
    combined_saving_s: float
    breakdown: Mapping[str, float]  # keys of BREAKDOWN
    findings: tuple[Finding, ...]  # by saving, largest first
    ops: tuple[OpRow, ...]  # by device time, largest first
    ranges: tuple[RangeRow, ...] = ()
    fixed_floor_s: float = 0.0  # the floor after all fixes: lower where one drops work or lowers the precision
    traced_step_s: float = 0.0  # the step as it was recorded, with the profiler's cost in it
    caveats: tuple[str, ...] = ()  # what limits how far this can be trusted, a sentence each
    unsure: bool = False  # whether one of the caveats may turn the verdict
    notes: tuple[str, ...] = ()  # what the reader must know: parts lost, assumptions, unknown costs with their share
    trace: Trace | None = None  # for the timeline and the memory chart
    window_s: tuple[float, float] = (0.0, 0.0)  # the step that the timeline draws, from the trace's first event
    meta: Mapping[str, Any] = field(default_factory=dict)
    drawn_by: Callable[[Explanation], str] | None = None  # what a notebook shows it with

    @property
    def span(self) -> str:
        """What the figures are of, in a word."""
        return "run" if self.steps_from.startswith("the whole") else "step"

    @property
    def idle_s(self) -> float:
        """What of the step the device does nothing in."""
        return sum(seconds for name, seconds in self.breakdown.items() if name not in BUSY)

    @property
    def unknown_s(self) -> float:
        """Device time of ops whose cost is not known."""
        return self.breakdown.get("unknown", 0.0)

    @property
    def floor_known(self) -> bool:
        """Whether enough of the step has a known cost for the step to have a floor."""
        return bool(self.limits.limits) and self.unknown_s <= MOSTLY_KNOWN * self.step_s

    @property
    def fraction(self) -> float | None:
        """The share of the limit that the whole step reaches; None where the floor is not known."""
        return self.floor_s / self.step_s if self.floor_known and self.step_s > 0 else None

    def _repr_html_(self) -> str | None:
        return self.drawn_by(self) if self.drawn_by else None

    def to_json(self) -> dict[str, Any]:
        head = ("source", "device", "kind", "limits_from", "steps", "steps_from", "step_s", "step_spread_s")
        floors = ("traced_step_s", "op_floor_s", "floor_s", "fixed_floor_s", "fraction")
        verdict = ("verdict", "sentence", "unsure", "combined_saving_s")
        return {
            **{name: getattr(self, name) for name in (*head, *floors, *verdict)},
            "caveats": list(self.caveats),
            "breakdown": dict(self.breakdown),
            "findings": [finding.to_json() for finding in self.findings],
            "ops": [row.to_json() for row in self.ops],
            "ranges": [
                {name: getattr(row, name) for name in ("name", "calls", "host_s", "device_s", "streams")}
                for row in self.ranges
            ],
            "notes": list(self.notes),
        }
