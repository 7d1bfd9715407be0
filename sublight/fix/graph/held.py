"""One captured call: its input buffers, its graph, and what each of its outputs is to the caller."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sublight.fix.graph.backend import Backend, Captured
from sublight.fix.graph.bucket import Fit
from sublight.fix.graph.guard import Effects, Guard
from sublight.fix.graph.key import ALIGNMENT, Call, substitute, tensors_in
from sublight.fix.graph.refuse import storage
from sublight.fix.graph.report import GraphRow

SAMPLES = 8  # replays that are timed, after the first


class Buffer:
    """Where a graph finds one argument: the caller's own memory where the call writes into it, else a copy's."""

    def __init__(self, x: torch.Tensor, *, in_place: bool, shape: Sequence[int] | None = None) -> None:
        self.in_place, self.is_padded = in_place, shape is not None
        self.bytes = 0
        self.filled = 0  # of a padded one: how far the last call's values go
        if in_place:
            self.x = x.detach()
            self.pointer = x.data_ptr()
            return
        with torch.inference_mode(False):
            if shape is not None:
                self.x = self._writable = torch.zeros(tuple(shape), dtype=x.dtype, device=x.device)
            else:
                self.x, self._writable = _like(x)
        self.bytes = self.x.untyped_storage().nbytes()

    def fill(self, x: torch.Tensor, at: Fit | None) -> None:
        if self.in_place:
            return
        if not self.is_padded or at is None:
            self._writable.copy_(_once(x), non_blocking=True)
            return
        self._writable.narrow(at.dim, 0, at.n).copy_(x, non_blocking=True)
        if at.n < self.filled:  # rows of an earlier, longer call
            self._writable.narrow(at.dim, at.n, self.filled - at.n).zero_()
        self.filled = at.n


def _once(x: torch.Tensor) -> torch.Tensor:
    """Without the repeats of an expanded dimension."""
    if 0 not in x.stride():
        return x
    small = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(small, x.stride(), x.storage_offset())


def _like(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory with x's strides and alignment, so that the same kernels run; and the part of it that is written."""
    once = _once(x)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(once.shape, once.stride(), strict=True))
    lead = (x.data_ptr() % ALIGNMENT) // x.element_size()
    memory = torch.zeros(lead + (extent if x.numel() else 0), dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, x.stride(), lead), memory.as_strided(once.shape, once.stride(), lead)


def overlaps(x: torch.Tensor) -> bool:
    """Whether elements share memory in another way than by an expanded dimension: no copy has such strides.

    >>> overlaps(torch.ones(3, 1).expand(3, 4)), overlaps(torch.ones(8).unfold(0, 4, 1))
    (False, True)
    """
    reach = 0
    for stride, size in sorted((t, s) for s, t in zip(x.shape, x.stride(), strict=True) if s > 1 and t > 0):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


@dataclass(slots=True, kw_only=True)
class Held:
    """A graph and all it needs to stay right."""

    call: str
    device: torch.device
    buffers: list[Buffer]
    captured: Captured
    guard: Guard
    effects: Effects
    outside: list[torch.Tensor]  # kept alive: a graph knows addresses only
    dims: list[int | None]  # of each output, the dimension that is as long as the padded inputs'
    capture_s: float
    eager_s: float | None
    launch_s: float | None
    static_outputs: bool
    written: frozenset[int] = frozenset()  # the storages that it writes into
    replays: int = 0
    marks: list[tuple[Any, Any, float]] = field(default_factory=list)
    _plan: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        mine = {storage(x) for x in self.outside} | {storage(b.x) for b in self.buffers if b.in_place}
        given = {id(b.x): i for i, b in enumerate(self.buffers)}
        for x in tensors_in(self.captured.outputs):
            if id(x) in given:
                self._plan.append(("argument", given[id(x)]))
            elif storage(x) in mine:
                self._plan.append(("itself", x))
            else:
                self._plan.append(("made", x.detach()))

    @property
    def bytes(self) -> int:
        return self.captured.pool_bytes + self.captured.driver_bytes + sum(b.bytes for b in self.buffers)

    def is_for(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the arguments that it writes into lie where they lay."""
        return all(not b.in_place or b.pointer == x.data_ptr() for b, x in zip(self.buffers, tensors, strict=True))

    def is_overlapped(self, tensors: list[torch.Tensor]) -> bool:
        """Whether an argument that is copied in lies where the graph writes: it would not see that."""
        copied = (x for b, x in zip(self.buffers, tensors, strict=True) if not b.in_place)
        return bool(self.written) and any(storage(x) in self.written for x in copied)

    def replay(self, backend: Backend, tensors: list[torch.Tensor], at: Fit | None) -> Any:
        is_timed = 0 < self.replays <= SAMPLES
        begin, start = time.perf_counter(), backend.mark() if is_timed else None
        for buffer, x in zip(self.buffers, tensors, strict=True):
            buffer.fill(x, at)
        self.captured.replay()
        self.effects.put()
        result = self._outputs(tensors, at)
        if is_timed:
            self.marks.append((start, backend.mark(), time.perf_counter() - begin))
        self.replays += 1
        return result

    def _outputs(self, tensors: list[torch.Tensor], at: Fit | None) -> Any:
        plan, dims = iter(self._plan), iter(self.dims)

        def put(_: torch.Tensor) -> Any:
            (kind, what), dim = next(plan), next(dims, None)
            if kind == "argument":
                return tensors[what]
            if kind == "itself":
                return what
            cut = what.narrow(dim, 0, at.n) if dim is not None and at is not None else what
            return cut if self.static_outputs else cut.clone()

        return substitute(self.captured.outputs, put)

    def row(self, backend: Backend) -> GraphRow:
        times = [max(backend.between_s(start, end), host_s) for start, end, host_s in self.marks]
        return GraphRow(
            call=self.call,
            pool_bytes=self.captured.pool_bytes,
            static_bytes=sum(b.bytes for b in self.buffers),
            driver_bytes=self.captured.driver_bytes,
            replays=self.replays,
            capture_s=self.capture_s,
            eager_s=self.eager_s,
            launch_s=self.launch_s,
            graph_s=statistics.median(times) if times else None,
        )


def unfit(call: Call) -> str:
    """Why no buffers can stand for a call's arguments."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors):
        return "an argument needs gradients: detach it, or make a graph of the whole training step"
    return "an argument's elements share memory: make it contiguous" if any(map(overlaps, call.tensors)) else ""
