"""Some of a launch's programs: the first, the last, and one of each of many equal parts, drawn by chance."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

Index = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How much of each launch is run."""

    parts: int  # a program of each
    least: int  # programs that are run however long they take
    seconds: float  # of processor time: no more programs are begun after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How many elements of one storage the programs that ran have stored."""

    total: int  # programs of the launch
    counts: tuple[int, ...]  # one for each program that ran


@dataclass(slots=True)
class Drawn:
    """The programs of one launch that are run: no long stretch goes unseen, and none runs twice.

    Parts come in any order, after the first and the last, which have more or less to do than others where any have.
    Gone through again, it gives the same.
    """

    shape: Index
    sample: Sample
    ran: list[Index] = field(default_factory=list)

    def __iter__(self) -> Iterator[Index]:
        if self.ran:
            yield from self.ran
            return
        began = time.process_time()
        total = self.shape[0] * self.shape[1] * self.shape[2]
        luck, parts = random.SystemRandom(), min(self.sample.parts, total)
        drawn = [luck.randrange(part * total // parts, (part + 1) * total // parts) for part in range(parts)]
        luck.shuffle(drawn)
        for at in dict.fromkeys((0, total - 1, *drawn)):
            if len(self.ran) >= self.sample.least and time.process_time() - began > self.sample.seconds:
                return
            index = at // (self.shape[1] * self.shape[2]), at // self.shape[2] % self.shape[1], at % self.shape[2]
            self.ran.append(index)
            yield index
