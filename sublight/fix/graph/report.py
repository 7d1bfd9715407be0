"""What the graphs of one function cost and save, as measured: memory, replays, time against eager, and why.

A graph saves what the host needs to launch a call. A decode step launches hundreds of kernels that each take
microseconds: the GPU waits for Python, and a graph pays. A prefill's kernels take longer than their launches: the GPU
is busy anyway, and a graph only costs memory.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from sublight import units

PAYS = 0.03  # of the eager time: less is within what two measurements differ by


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRow:
    """One graph that is held. Times are of one call, None where never measured."""

    call: str  # its tensors
    pool_bytes: int  # by which the shared pool grew for it
    static_bytes: int  # its input buffers
    driver_bytes: int  # what the driver took for its nodes, as far as that can be seen
    replays: int
    capture_s: float
    eager_s: float | None
    launch_s: float | None  # the part of eager_s until Python had launched everything
    graph_s: float | None

    @property
    def bytes(self) -> int:
        return self.pool_bytes + self.static_bytes + self.driver_bytes

    @property
    def saving_s(self) -> float | None:
        """The time that one replayed call saves."""
        return None if self.eager_s is None or self.graph_s is None else self.eager_s - self.graph_s

    @property
    def saved_s(self) -> float | None:
        """The time that all replays saved, without subtracting the capture's."""
        return None if self.saving_s is None else self.saving_s * self.replays

    @property
    def pays(self) -> bool | None:
        return None if self.saving_s is None or self.eager_s is None else self.saving_s > PAYS * self.eager_s

    @property
    def pays_after(self) -> int | None:
        """Calls after which the capture's own time is earned."""
        return math.ceil(self.capture_s / self.saving_s) if self.pays and self.saving_s else None

    @property
    def verdict(self) -> str:
        if self.pays is None or self.launch_s is None or self.eager_s is None or self.graph_s is None:
            return "not measured yet"
        launch, busy = units.text(self.launch_s, "s"), units.text(self.graph_s, "s")
        if self.pays:
            after = f"pays after {self.pays_after} calls"
            return f"launch-bound: the host needs {launch} to launch what the GPU does in {busy}; {after}"
        return f"device-bound: the GPU is busy for {busy}, launching takes {launch}; a graph saves nothing here"

    def to_json(self) -> dict[str, Any]:
        derived = {"bytes": self.bytes, "saved_s": self.saved_s, "pays": self.pays, "pays_after": self.pays_after}
        return {**asdict(self), **derived, "verdict": self.verdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerRow:
    """Calls that run eagerly, and why; or still do."""

    call: str
    calls: int
    reason: str
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """What `graph.report()` gives; print it."""

    name: str
    graphs: tuple[GraphRow, ...]
    eager: tuple[EagerRow, ...]
    budget_bytes: int
    pool_bytes: int  # of the one pool that all graphs share, what evicted ones left in it too
    captures: int
    evictions: int
    notes: tuple[str, ...] = ()

    @property
    def held_bytes(self) -> int:
        return self.pool_bytes + sum(row.static_bytes + row.driver_bytes for row in self.graphs)

    @property
    def saved_s(self) -> float:
        return sum(row.saved_s or 0.0 for row in self.graphs)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "graphs": [row.to_json() for row in self.graphs],
            "eager": [asdict(row) for row in self.eager],
            "held_bytes": self.held_bytes,
            "budget_bytes": self.budget_bytes,
            "saved_s": self.saved_s,
            "captures": self.captures,
            "evictions": self.evictions,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        of = f"{units.text(self.held_bytes, 'B')} of {units.text(self.budget_bytes, 'B')}"
        lines = [
            f"graph of {self.name}: {len(self.graphs)} held, {of}, {self.captures} captured, {self.evictions} evicted, "
            f"{units.text(self.saved_s, 's')} saved"
        ]
        for row in self.graphs:
            times = f"eager {units.text(row.eager_s, 's')}, graph {units.text(row.graph_s, 's')}"
            lines.append(f"  {row.call}: {row.replays} replays, {units.text(row.bytes, 'B')}, {times}; {row.verdict}")
        for left in self.eager:
            where = f" ({left.line})" if left.line else ""
            lines.append(f"  {left.call}: {left.calls} eager: {left.reason}{where}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
