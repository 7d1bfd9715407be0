"""The graphs of one function: by kind of call, in one pool, under one budget; the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from sublight import units
from sublight.fix.graph.backend import Backend
from sublight.fix.graph.held import Held
from sublight.fix.graph.refuse import Refusal, Watch
from sublight.fix.graph.report import EagerRow


@dataclass(slots=True, kw_only=True)
class Kind:
    """All calls with one key: warming up, held as graphs, or refused."""

    call: str
    calls: int = 0
    watched: int = 0
    is_settled: bool = False  # the last two watched calls did the same
    watch: Watch | None = None  # of the last watched call
    before: list[Any] | None = None  # numbers outside, when it began
    is_changed: bool = False  # what is held fits no more, and another graph is on its way
    written: tuple[bool, ...] = ()  # the arguments it writes into
    dims: list[int | None] | None = None  # of a bucket: how outputs follow inputs
    is_tried: bool = False  # that is known from a run, not from where sizes stand
    eager_s: float | None = None
    launch_s: float | None = None
    held: list[Held] = field(default_factory=list)
    misses: int = 0
    refusal: Refusal | None = None
    note: str = ""

    def is_overlapped(self, tensors: list[torch.Tensor]) -> bool:
        return any(held.is_overlapped(tensors) for held in self.held)

    def eager_row(self, warmup: int) -> EagerRow:
        if self.refusal is not None:
            return EagerRow(call=self.call, calls=self.calls, reason=self.refusal.reason, line=self.refusal.line)
        return EagerRow(call=self.call, calls=self.calls, reason=self.note or f"warming up (warmup={warmup})")


class Store:
    """What is held. A pool's memory goes back to the GPU only when its last graph goes, so it is counted as a whole."""

    def __init__(self, backend: Backend, budget_bytes: int) -> None:
        self.backend, self.budget_bytes = backend, budget_bytes
        self.pool: Any = None
        self.pool_bytes = 0
        self.captures = self.evictions = 0
        self._in_pool = 0
        self._order: OrderedDict[int, tuple[Kind, Held]] = OrderedDict()  # the least recently used first

    def the_pool(self) -> Any:
        if self.pool is None:
            self.pool = self.backend.new_pool()
        return self.pool

    def add(self, kind: Kind, held: Held) -> None:
        kind.held.append(held)
        self._order[id(held)] = (kind, held)
        self.pool_bytes += held.captured.pool_bytes
        self.captures += 1
        self._in_pool += 1

    def used(self, held: Held) -> None:
        self._order.move_to_end(id(held))

    def keep_budget(self, newest: Held) -> Refusal | None:
        """Let the least recently used go, not the newest; where the pool itself has grown too large let all go, for
        those that are called again come back into a new one. A graph that is too large alone is refused."""
        over = sum(held.bytes for _, held in self._order.values()) - self.budget_bytes
        gone = []
        for kind, held in self._order.values():
            if over > 0 and held is not newest:
                gone.append((kind, held))
                over -= held.bytes
        self.evict(gone)
        beside = sum(held.bytes - held.captured.pool_bytes for _, held in self._order.values())
        if self.pool_bytes + beside <= self.budget_bytes:
            return None
        is_alone = self._in_pool == 1
        self.evict(list(self._order.values()))
        need, have = units.text(newest.bytes, "B"), units.text(self.budget_bytes, "B")
        return Refusal(reason=f"its graph takes {need}: more than memory_budget, {have}") if is_alone else None

    def drop(self, kind: Kind, held: list[Held]) -> None:
        """These are of no use any more."""
        self._let_go([(kind, each) for each in held])

    def evict(self, gone: list[tuple[Kind, Held]]) -> None:
        self._let_go(gone)
        self.evictions += len(gone)

    def clear(self) -> None:
        self._let_go(list(self._order.values()))

    def _let_go(self, gone: list[tuple[Kind, Held]]) -> None:
        for device in {held.device for _, held in gone}:
            self.backend.synchronize(device)  # a replay may be underway
        for kind, held in gone:
            kind.held = [each for each in kind.held if each is not held]
            del self._order[id(held)]
            held.captured.reset()
        if not self._order:
            self.pool, self.pool_bytes, self._in_pool = None, 0, 0


def device_of(tensors: list[torch.Tensor], device_type: str) -> torch.device:
    return tensors[0].device if tensors else torch.device(device_type)
