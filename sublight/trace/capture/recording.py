"""What a capture has gathered, and the trace file that is made of it once it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sublight.sampling import Samples
from sublight.trace.capture.device import cuda_ready
from sublight.trace.capture.file import Counters, dynamo_meta, machine, peak_memory_bytes, write
from sublight.trace.capture.folder import Folder
from sublight.trace.capture.graphs import ops_of_kernels, replays
from sublight.trace.capture.python import described
from sublight.trace.capture.source import Sources
from sublight.trace.capture.steps import STEPS_FROM, STRENGTH, WHOLE_RUN, Kind


@dataclass(kw_only=True)
class Recording:
    """Filled in by the recorder, phase by phase."""

    folder: Folder
    command: str
    script: str = ""
    notes: list[str] = field(default_factory=list)
    steps_from: str = WHOLE_RUN
    written: bool = False
    first: Path | None = None  # what the finding's profile saw
    first_note: str = ""
    counts: dict[Kind, int] = field(default_factory=dict)  # boundaries of each kind in it
    kind: Kind | None = None  # that marks the steps
    window: Path | None = None  # what the profiled steps' profile saw
    steps: int = 0  # profiled to their end
    cut_short: bool = False  # and another one, that has no end
    step_s: list[float] = field(default_factory=list)  # of the steps that were timed
    total_s: float = 0.0
    sources: Sources = field(default_factory=Sources)
    samples: Samples = field(default_factory=Samples)
    sampled_steps: dict[str, int] = field(default_factory=dict)  # by the samples' label
    start: Counters = field(default_factory=Counters)
    begin: Counters | None = None  # of the measured windows
    timed: Counters | None = None  # after the first of them
    end: Counters | None = None

    def write(self) -> None:
        """Once: the profiled steps where one was whole, else what the finding saw."""
        if self.written:
            return
        if self.window is not None and self.steps:
            unfinished = {f"ProfilerStep#{self.steps + 1}": ""} if self.cut_short else {}
            meta = dict(self._meta())
            if self.first is not None and cuda_ready() and replays(self.window):
                meta["graph_kernels"] = ops_of_kernels(self.first)
            write(self.window, self.folder.trace, meta, rename=unfinished)
        elif self.first is not None:
            self._write_first(self.first)
        else:
            return
        self.written = True
        for raw in (self.first, self.window):
            if raw is not None:
                raw.unlink(missing_ok=True)
        self.first = self.window = None

    def _write_first(self, first: Path) -> None:
        self.notes += [self.first_note] if self.first_note else []
        whole = [kind for kind in STRENGTH if self.counts.get(kind, 0) > 1]
        chosen = self.kind if self.kind in whole else next(iter(whole), None)
        rename = {
            candidate_name(kind, number): "" for kind, last in self.counts.items() for number in range(1, last + 1)
        }
        if chosen is None:
            self.steps_from = WHOLE_RUN
        else:
            self.steps_from = STEPS_FROM[chosen]
            count = self.counts[chosen] - 1  # the last one is open to the end: no whole step
            rename |= {candidate_name(chosen, number): f"ProfilerStep#{number}" for number in range(1, count + 1)}
            self.notes.append(
                f"no step after the warm-up could be profiled: the report shows the first "
                f"{'one' if count == 1 else count} that the profiler saw"
            )
        write(first, self.folder.trace, self._meta(), rename=rename)

    def _meta(self) -> Mapping[str, Any]:
        end = self.end or Counters.now()
        begin = self.begin or end
        timed = self.timed or begin
        return {
            "version": 1,
            "steps_from": self.steps_from,
            "unprofiled_step_s": self.step_s,
            "unprofiled_total_s": self.total_s,
            "unprofiled_steps": len(self.step_s),
            "command": self.command,
            **machine(),
            "sources": {name: getattr(self.sources, name) for name in ("ops", "index", "source", "module")},
            "samples": described(self.samples, self.sampled_steps, script=self.script),
            "peak_memory_bytes": peak_memory_bytes(),
            "allocator": {name: count - begin.allocator.get(name, 0) for name, count in timed.allocator.items()},
            "dynamo": dynamo_meta(self.start, begin, end),
            "notes": list(self.notes),
        }


def candidate_name(kind: Kind, number: int) -> str:
    """The range that the finding opens at each boundary: which kind marks the steps is known later."""
    return f"sublight.{kind}#{number}"
