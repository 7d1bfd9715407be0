"""What is known of a value's lanes with regard to padding, and when a result is in doubt by it; see padding.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sublight.xray.record import Place
from sublight.xray.sanitize.bf16 import widen
from sublight.xray.sanitize.memory import Array

KEY = "padding"
SAME = {"fp16": 2e-2, "bf16": 4e-2}  # by how much two ways to one number may differ,
SAME_WIDE = 1e-3  # in other types
NO: Any = np.False_
YES: Any = np.True_


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A value that padding may have changed: what it would be with the padding, and without."""

    place: Place  # of the reduction
    words: str
    remedy: str
    both: tuple[Array, Array]

    def shows(self, value: Any, lanes: Array) -> bool:
        """Whether the two differ in these lanes of the value that has come of it."""
        same = SAME.get(value.dtype.scalar.name, SAME_WIDE)
        with np.errstate(all="ignore"):
            one, two = (np.broadcast_to(numbers(value, each), lanes.shape)[lanes] for each in self.both)
            size = np.fmax(np.abs(one), np.abs(two))
            least = same * np.fmax(size, 1e-3 * np.max(size, initial=0.0, where=np.isfinite(size)))
            return bool(((np.abs(one - two) > least) | (np.isfinite(one) != np.isfinite(two))).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Of each lane, in a shape that broadcasts to the value's."""

    filled: Any = NO  # something that `other` filled is in it
    data: Any = NO  # something loaded is in it
    shared: Any = NO  # a reduction of data is in it
    loads: frozenset[Place] = frozenset()  # of its data
    mask: Place | None = None  # the load that left lanes out
    filler: float = 0.0
    doubts: tuple[Doubt, ...] = ()

    @property
    def padding(self) -> Any:
        return self.filled & ~self.data

    @property
    def words(self) -> str:
        return f"lanes that the mask of line {self.mask.line if self.mask else '?'} leaves out"


NONE = Status()


def status_of(handle: Any) -> Status:
    found: Status = handle.attr.get(KEY, NONE)
    return found


def merged(sources: list[Status]) -> Status:
    def either(name: str) -> Any:
        found = NO
        for each in sources:
            lanes = getattr(each, name)
            if lanes is not NO and lanes is not found:
                found = lanes if found is NO else found | lanes
        return found

    masked = next((each for each in sources if each.mask), NONE)
    return Status(
        filled=either("filled"),
        data=either("data"),
        shared=either("shared"),
        loads=frozenset().union(*(each.loads for each in sources)),
        mask=masked.mask,
        filler=masked.filler,
    )


def full(lanes: Any, handle: Any) -> Any:
    return np.broadcast_to(lanes, handle.data.shape)


def add(result: Any, doubt: Doubt) -> None:
    """One more doubt of a value; a line has one."""
    status = result.attr[KEY]
    known = tuple(each for each in status.doubts if each.place != doubt.place)
    result.attr[KEY] = replace(status, doubts=(*known, doubt))


@contextlib.contextmanager
def unless_it_fails(*results: Any) -> Iterator[None]:
    """A shape that no rule here thought of must not end the user's script: nothing is held against the result then."""
    try:
        yield
    except (ValueError, IndexError, TypeError):
        for each in results:
            each.attr[KEY] = Status(data=YES)


def is_bf16(handle: Any) -> bool:
    return bool(handle.data.dtype == np.uint16 and handle.dtype.scalar.name == "bf16")


def numbers(handle: Any, data: Array | None = None) -> Array:
    """As float64, whatever they are kept as."""
    data = handle.data if data is None else data
    return (widen(data) if is_bf16(handle) else np.asarray(data)).astype(np.float64)


def of_sum(status: Status, term: Any, how: str, place: Place, real: Array, right: Array, lanes: Array) -> Doubt:
    """A sum that is `real` with the padding, and would be `right` without."""
    return Doubt(
        place=place,
        words=f"{status.words} are not 0 here ({float(term):.3g}) and {how}",
        remedy="tl.where(mask, …, 0.0) before",
        both=_apart(real, right, lanes),
    )


def _apart(real: Array, right: Array, lanes: Array) -> tuple[Array, Array]:
    """Far enough from each other for every op that follows to show it, whatever the data are."""
    if not np.issubdtype(real.dtype, np.floating):
        return np.where(lanes, real, right), np.asarray(right)
    with np.errstate(all="ignore"):
        gap = np.where(real >= right, 1, -1) * np.fmax(np.abs(real - right), np.abs(right) / 2)
        return np.where(lanes, right + gap, real).astype(real.dtype), np.where(lanes, right, real).astype(real.dtype)


def below(best: Any) -> Any:
    """What loses to it, visibly."""
    return best - np.maximum(1.0, np.abs(best) / 4)


def words_of_extreme(status: Status, sign: int, winner: float) -> dict[str, str]:
    return {
        "words": f"{status.words} are {winner:g} here and win this {'maximum' if sign > 0 else 'minimum'} where all "
        f"others are {'smaller' if sign > 0 else 'larger'}",
        "remedy": f"other={'-' if sign > 0 else ''}float('inf'), or tl.where(mask, …) before",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One reduction over data and padding."""

    place: Place
    status: Status
    value: Any  # its first input
    outcomes: list[Any]
    axis: int | None
    again: Callable[[Array], list[Array]]  # on other values

    @property
    def padding(self) -> Any:
        return full(self.status.padding, self.value)

    @property
    def others(self) -> Any:
        return full(self.status.data | self.status.shared, self.value) & ~self.padding

    def rows(self, lanes: Array) -> Array:
        """Of the outcome: whether there are such lanes."""
        found: Array = np.asarray(lanes.any(axis=self.axis)).reshape(self.outcomes[0].data.shape)
        return found

    def doubt_sum(self) -> list[Doubt]:
        data = self.value.data
        lanes = self.padding & (data != 0)
        if not lanes.any():
            return []
        real, [right] = self.outcomes[0].data, self.again(np.where(self.padding, np.zeros_like(data), data))
        rows = self.rows(self.others) & (real != right)
        how = "enter this sum with the others"
        return [of_sum(self.status, data[lanes].flat[0], how, self.place, real, right, rows)] if rows.any() else []

    def doubt_combined(self) -> list[Doubt]:
        """By a function of the user's: the same over the lanes without padding, as many as each row has."""
        data, axis = self.value.data, self.axis or 0
        real, right = self.outcomes[0].data, self.outcomes[0].data.copy()
        counts = (~self.padding).sum(axis=axis).reshape(real.shape)
        front = np.take_along_axis(data, np.argsort(self.padding, axis=axis, kind="stable"), axis=axis)
        for count in np.unique(counts[(counts > 0) & (counts < data.shape[axis])]).tolist():
            [alone] = self.again(np.ascontiguousarray(np.take(front, range(count), axis=axis)))
            right = np.where(counts == count, alone.reshape(real.shape), right)
        rows = self.rows(self.others) & ~np.isclose(real, right, rtol=SAME_WIDE, atol=0, equal_nan=True)
        if not rows.any():
            return []
        doubt = of_sum(self.status, self.status.filler, "change this reduction", self.place, real, right, rows)
        words = f"{self.status.words} are combined with the others here, which changes the result"
        return [replace(doubt, words=words, remedy="other=… or tl.where(mask, …) with what changes nothing")]

    def doubt_extreme(self, sign: int, worst: dict[Place, float]) -> list[Doubt]:
        """Hypothetical: the padding has won, where the best of the data is a little worse. `worst` is the lane of data
        that is the first to lose, among all that a line has seen: where nothing is worse than the padding, all is well.
        """
        x, real = sign * self.value.data.astype(np.float64), [each.data for each in self.outcomes]
        least = np.min(x, initial=np.inf, where=self.others & ~np.isnan(x))
        worst[self.place] = min(worst.get(self.place, np.inf), float(least))
        best = np.max(x, axis=self.axis, initial=-np.inf, where=self.padding).reshape(real[0].shape)
        rows = self.rows(self.others) & (best > worst[self.place])
        if not rows.any():
            return []
        with np.errstate(all="ignore"):
            values = tuple(np.where(rows, sign * each, real[0]).astype(real[0].dtype) for each in (best, below(best)))
        words = words_of_extreme(self.status, sign, float(sign * best[rows].flat[0]))
        doubts = [Doubt(place=self.place, both=(values[0], values[1]), **words)]
        if len(real) > 1:  # the index, too
            at = [np.argmax(np.where(lanes, x, -np.inf), axis=self.axis) for lanes in (self.padding, self.others)]
            places = tuple(np.where(rows, each.reshape(real[1].shape), real[1]).astype(real[1].dtype) for each in at)
            doubts.append(Doubt(place=self.place, both=(places[0], places[1]), **words))
        return doubts
