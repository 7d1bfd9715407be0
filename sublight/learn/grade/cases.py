"""The sizes that a submission is run on: some that it was shown, and some that nobody knows beforehand."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sublight.cost import Shape
from sublight.learn.record import Exercise


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape and a data type."""

    shape: Shape
    dtype: str
    is_plain: bool = False  # of a step on paper: plain numbers, which have no data type to speak of

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} = {size}" for name, size in self.shape.items())
        return sizes if self.is_plain else f"{sizes}, {self.dtype}"


def cases_of(exercise: Exercise, luck: random.Random) -> list[Case]:
    """Sizes that were shown and sizes that were not: the smallest, one around a power of two, and odd ones."""
    smallest = {name: low for name, (low, _) in exercise.sizes.items()}
    shapes: list[Shape] = [exercise.shown, smallest]
    for pick in (_near_power, _odd, _odd):
        shapes.append({name: pick(low, high, luck) for name, (low, high) in exercise.sizes.items()})
    first, *others = exercise.dtypes
    is_plain = exercise.kind == "paper"
    return [Case(shape=shape, dtype=first, is_plain=is_plain) for shape in shapes] + [
        Case(shape=shapes[-1], dtype=other) for other in others
    ]


def _near_power(low: int, high: int, luck: random.Random) -> int:
    """A power of two, or one more or less."""
    powers = [power for power in (2**n for n in range(32)) if low < power < high]
    return luck.choice(powers or [low]) + luck.choice((-1, 0, 1)) if powers else low


def _odd(low: int, high: int, luck: random.Random) -> int:
    """No multiple of anything that a block may be; in the upper half, so that several blocks are needed."""
    return min(high, luck.randint((low + high) // 2, high) | 1)
