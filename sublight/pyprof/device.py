"""The device's time by the Python line that launched it, with what the host spent there: from the capture of `explain`.

A kernel's launch lies inside an op, and the capture knows the op's line; a kernel of the backward pass counts for the
line of its forward op. Beside it stands what the host spent in the line's ops, and how often looks saw Python there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sublight.sampling import Samples
from sublight.trace import steps as trace_steps
from sublight.trace.attribute import attribute
from sublight.trace.record import NONE, Kind, Trace

ELSEWHERE = "no line known"


@dataclass(slots=True)
class DeviceLine:
    """A line of the user's; all times are of one step."""

    place: str  # "train.py:41 (forward)", or ELSEWHERE
    device_s: float = 0.0
    launches: float = 0.0
    host_s: float = 0.0  # in the ops of this line
    seen_s: float = 0.0  # by looks, with what it called
    kernels: Counter[str] = field(default_factory=Counter)

    @property
    def kernel(self) -> str:
        """The one that takes most."""
        return max(self.kernels, key=self.kernels.__getitem__, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    lines: tuple[DeviceLine, ...]  # by the device's time, then the host's
    steps: int
    step_s: float
    device_s: float  # of one step: kernels, copies and memsets
    on_gpu: bool
    whole_run: bool = False  # no step was found

    def to_json(self) -> dict[str, Any]:
        names = ("place", "device_s", "launches", "host_s", "seen_s", "kernel")
        lines = [{name: getattr(line, name) for name in names} for line in self.lines]
        return {
            "steps": self.steps,
            "step_s": self.step_s,
            "device_s": self.device_s,
            "on_gpu": self.on_gpu,
            "whole_run": self.whole_run,
            "lines": lines,
        }


def device_profile(trace: Trace) -> DeviceProfile:
    attribution, found = attribute(trace), trace_steps.find(trace)
    count = found.count
    lines: dict[str, DeviceLine] = {}

    def line(row: int) -> DeviceLine:
        place = attribution.place(row)[0] or ELSEWHERE
        return lines.setdefault(place, DeviceLine(place))

    def inside(at_ns: int) -> bool:
        return any(low <= at_ns < high for low, high in found.spans_ns)

    device_ns = 0
    for row in trace.device_rows.tolist():
        launch = int(attribution.launch[row])
        if not inside(int(trace.start_ns[launch if launch != NONE else row])):
            continue
        took_ns, one = int(trace.end_ns[row] - trace.start_ns[row]), line(row)
        device_ns += took_ns
        one.device_s += took_ns * 1e-9 / count
        one.launches += 1 / count
        one.kernels[trace.name_of(row)] += took_ns
    tops = attribution.top_ops
    for row in tops[trace.kind[tops] == Kind.OP].tolist():
        if inside(int(trace.start_ns[row])):
            line(row).host_s += int(trace.end_ns[row] - trace.start_ns[row]) * 1e-9 / count
    _add_looks(lines, trace)
    ranked = sorted(lines.values(), key=lambda one: (-one.device_s, -one.host_s, one.place))
    spans = np.array(found.spans_ns)
    return DeviceProfile(
        lines=tuple(ranked),
        steps=count,
        step_s=float(np.median(spans[:, 1] - spans[:, 0])) * 1e-9,
        device_s=device_ns * 1e-9 / count,
        on_gpu=trace.on_gpu,
        whole_run=found.found_by == trace_steps.WHOLE,
    )


def _add_looks(lines: dict[str, DeviceLine], trace: Trace) -> None:
    """How long looks saw the main thread in each line, a step, of the steps that ran without the profiler."""
    data = trace.meta.get("samples")
    try:
        samples = Samples.from_json(data)  # type: ignore[arg-type]
        steps = {str(label): int(count) for label, count in data["steps"].items()}  # type: ignore[index, call-overload, union-attr]
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    count = steps.get("timed", 0) + steps.get("sampled", 0)
    if not count:
        return
    by_place = {line.place.partition(" (")[0]: line for line in lines.values()}
    for row in samples.of("timed", "sampled", thread=0):
        for place in {f"{frame.file}:{frame.line}" for frame in samples.stack(row)}:
            if place in by_place:
                by_place[place].seen_s += row.wall_ns * 1e-9 / count
