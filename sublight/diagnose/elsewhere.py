"""What recorded steps would take on another GPU: each op keeps its distance from the floor, and the floor moves.

An op of unknown cost moves with the memory rate, a collective of unknown size with the links' rate; one that is bound
by its launch stays as it is, as does a copy of pageable memory, whose time is the host's. So the step's kernels,
copies and communication move, each part as its ops do together. Idle time is the host's, and stays: on a faster GPU a
step that waits for launches gains less than its ops do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sublight.diagnose import known
from sublight.diagnose.explain import explain
from sublight.diagnose.items import gpu_items
from sublight.diagnose.record import BUSY
from sublight.diagnose.work import Item, device_rows
from sublight.errors import BadInput
from sublight.predict.machine import Machine
from sublight.results import Limits
from sublight.trace import cut as cuts
from sublight.trace import steps
from sublight.trace.attribute import attribute
from sublight.trace.record import Trace

Part = Literal["kernels", "copy", "communication"]
Way = Literal["floor", "memory rate", "link rate", "kept"]  # how an op's time was carried over


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedOp:
    """All calls of one op in a step."""

    name: str
    family: str
    calls: float
    recorded_s: float
    floor_s: float  # there, of what has one
    expected_s: float  # there
    way: Way
    bound: str

    @property
    def part(self) -> Part:
        if self.family == "communication":
            return "communication"
        return "copy" if self.name.startswith("Memcpy") else "kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A step as it was recorded, and as it would be; seconds a step."""

    source: str
    recorded_on: str
    machine: Machine
    steps: int
    step_s: float  # as `explain` has it: without what the profiler cost, where that is known
    parts: dict[Part, float]  # of it, the device's kernels, and copies and communication while no kernel ran
    ops: tuple[CarriedOp, ...]  # most time first

    @property
    def busy_s(self) -> float:
        return self.parts["kernels"]

    @property
    def idle_s(self) -> float:
        """What is the host's, and stays."""
        return max(self.step_s - sum(self.parts.values()), 0.0)

    @property
    def expected_busy_s(self) -> float:
        return self._moved_s("kernels")

    @property
    def expected_s(self) -> float:
        return self.idle_s + sum(self._moved_s(part) for part in self.parts)

    def _moved_s(self, part: Part) -> float:
        """As its ops move together: beside each other they take longer than their part of the step."""
        mine = [op for op in self.ops if op.part == part]
        recorded_s = sum(op.recorded_s for op in mine)
        return self.parts[part] * (sum(op.expected_s for op in mine) / recorded_s if recorded_s else 1.0)


def elsewhere(traces: Sequence[Trace], machine: Machine, *, source: str = "") -> Elsewhere:
    """The first trace's steps on another GPU."""
    trace = min(traces, key=lambda each: (each.rank is None, each.rank or 0))
    if not trace.on_gpu:
        raise BadInput(
            f"{source or trace.source} was recorded on a CPU: a trace of a GPU tells what another GPU would do"
        )
    limits, limits_from = known.limits_for(trace)
    if not limits.limits:
        why = limits_from.partition(";")[0].removeprefix("none: ")  # what --gpu does for `explain`, it does not do here
        raise BadInput(
            f"{source or trace.source}: {why}, and its limits are needed to carry times over: "
            "`sublight gpus` lists the GPUs whose traces can be"
        )
    found = steps.find(trace)
    chosen = cuts.typical(trace, found)
    part = trace if chosen is found else cuts.cut(trace, chosen.spans_ns[0][0], chosen.spans_ns[-1][1])
    attribution = attribute(part)
    items, _ = gpu_items(attribution, device_rows(attribution, chosen), limits)
    whole = explain([trace])
    return Elsewhere(
        source=source or trace.source,
        recorded_on=known.device_of(trace, limits),
        machine=machine,
        steps=chosen.count,
        step_s=whole.step_s,
        parts={
            "kernels": sum(whole.breakdown[name] for name in BUSY),
            "copy": whole.breakdown["copy"],
            "communication": whole.breakdown["communication"],
        },
        ops=_ops(items, limits, machine.limits, chosen.count),
    )


def _ops(items: Sequence[Item], here: Limits, there: Limits, count: int) -> tuple[CarriedOp, ...]:
    groups: dict[tuple[str, str, Way, str], list[tuple[Item, float, float]]] = {}
    for item in items:
        seconds, floor_s, way, bound = carried(item, here, there)
        groups.setdefault((item.name, item.family, way, bound), []).append((item, seconds, floor_s))
    found = [
        CarriedOp(
            name=name,
            family=family,
            calls=len(members) / count,
            recorded_s=sum(item.took_s for item, _, _ in members) / count,
            floor_s=sum(floor_s for _, _, floor_s in members) / count,
            expected_s=sum(seconds for _, seconds, _ in members) / count,
            way=way,
            bound=bound,
        )
        for (name, family, way, bound), members in groups.items()
    ]
    return tuple(sorted(found, key=lambda op: -op.recorded_s))


def carried(item: Item, here: Limits, there: Limits) -> tuple[float, float, Way, str]:
    """Seconds there, the floor there, how that is known, and what bounds it there."""
    if item.name.startswith("Memcpy") and "Pageable" in item.name:
        return item.took_s, item.floor_s or 0.0, "kept", "host"
    floor = there.floor(item.cost) if item.cost is not None else None
    is_link = item.family == "communication"
    by_links = floor is not None and {item.bound, floor.bound} <= {"peer_copy", "launch"}
    if item.floor_s and floor is not None and (by_links or not is_link):
        if item.bound == "launch":  # some are quicker than a launch is taken to be: they stay as they are
            least_s = floor.seconds if floor.seconds > item.floor_s else 0.0
            return max(item.took_s, least_s), floor.seconds, "kept", floor.bound
        return item.took_s * floor.seconds / item.floor_s, floor.seconds, "floor", floor.bound
    rates = [_link_rate(limits) if is_link else limits.value("hbm_copy") for limits in (here, there)]
    if rates[0] and rates[1]:
        return item.took_s * rates[0] / rates[1], 0.0, "link rate" if is_link else "memory rate", "unknown"
    return item.took_s, 0.0, "kept", "unknown"


def _link_rate(limits: Limits) -> float | None:
    """To other GPUs: NVLink, else PCIe."""
    return limits.value("peer_copy") or limits.value("h2d_pinned")
