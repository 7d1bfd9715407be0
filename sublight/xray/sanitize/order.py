"""What comes before what in one launch: atomics pass on what their program did, and locks are held by somebody.

Programs run one after another here, so a program that waits for a lock waits for one that has ended: it never gives
the lock back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sublight.xray.record import Place
from sublight.xray.sanitize.barriers import Barriers
from sublight.xray.sanitize.memory import Array

Kind = Literal["load", "store", "atomic", "atomic load", "atomic store"]
MOST_WAITS = 10_000  # scalar atomics of one program: more are a loop that waits


class LockKept(Exception):
    """A program waits for a lock whose owner never gives it back; a GPU would hang here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """Who took a lock: tl.atomic_cas found the one value and put the other."""

    index: tuple[int, int, int]
    place: Place
    taken: int  # what is there while it is held


@dataclass(slots=True)
class Order:
    """The order that scalar atomics give: a vector clock."""

    shape: tuple[int, int, int]  # the grid
    program: int = 0
    index: tuple[int, int, int] = (0, 0, 0)
    clock: Array | None = None  # by program: the last event that happened before now, through atomics
    released: dict[int, Array] = field(default_factory=dict)  # by address: what its last atomic passes on
    too_early: dict[int, int] = field(default_factory=dict)  # a store's event -> the atomic's that no barrier precedes
    own_early: set[int] = field(default_factory=set)  # of those, the present program's
    waits: int = 0  # scalar atomics of one program in a row
    owners: dict[int, _Owner] = field(default_factory=dict)  # by address

    def begin(self, program: int, index: tuple[int, int, int]) -> None:
        self.program, self.index, self.clock, self.waits = program, index, None, 0
        self.own_early = set()

    def is_open(self, events: Array, programs: Array) -> Array | bool:
        """Which of these events of other programs are not ordered before now."""
        return True if self.clock is None else events > self.clock[programs]

    def pass_on(self, address: int, event: int, barriers: Barriers, *, acquires: bool, releases: bool) -> None:
        """A scalar atomic hears what was done before its address was last released, and releases its own.

        What several warps have stored since the last barrier is passed on too early. A relaxed atomic does neither.
        """
        self.waits += 1
        if self.waits > MOST_WAITS:
            raise NotImplementedError(
                f"program {self.index} waits for a later one, and the interpreter runs one after another"
            )
        if self.clock is None:
            self.clock = np.zeros(int(np.prod(self.shape)), np.int64)
        if acquires and address in self.released:
            self.clock = np.maximum(self.clock, self.released[address])
        if releases:
            passed_on = self.clock.copy()
            passed_on[self.program] = event
            self.released[address] = passed_on
            for store in [store for store in self.own_early if store not in barriers.open_stores]:
                del self.too_early[store]  # a barrier came, and now they are passed on in time
                self.own_early.remove(store)
            self.too_early |= dict.fromkeys(barriers.open_stores, event)
            self.own_early |= set(barriers.open_stores)

    def compared(self, address: int, place: Place, *, expected: int, put: int, before: int) -> None:
        """A scalar tl.atomic_cas: it took a lock, or found it held."""
        if before == expected:
            self.owners[address] = _Owner(index=self.index, place=place, taken=put)
            return
        owner = self.owners.get(address)
        if owner is not None and before == put == owner.taken and self.waits >= MOST_WAITS:
            who = "it took itself" if owner.index == self.index else f"program {owner.index} took"
            raise LockKept(
                f"program {self.index} waits for a lock that {who} (line {owner.place.line}) and never gave back: "
                "end with tl.atomic_xchg(lock, 0), behind a tl.debug_barrier()"
            )
