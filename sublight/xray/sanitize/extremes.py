"""Padding in what keeps the order of lanes: a maximum over a loop, a choice by comparison, a sort; see padding.py."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sublight.xray.record import Place
from sublight.xray.sanitize.doubt import (
    KEY,
    Doubt,
    Status,
    add,
    below,
    full,
    is_bf16,
    numbers,
    status_of,
    unless_it_fails,
    words_of_extreme,
)
from sublight.xray.sanitize.memory import Array

_SIGN = {np.maximum: 1, np.fmax: 1, np.minimum: -1, np.fmin: -1}


@dataclass(frozen=True, slots=True)
class Extremes:
    """The builder methods and the sort that compare padding with data."""

    interpreter: Any
    place: Callable[[], Place]
    hypothetical: Callable[[], contextlib.AbstractContextManager[None]]
    worst: dict[Place, float]  # by line: the lane of data that is the first to lose

    def install(self, builder: Any) -> None:
        builder.binary_op = self._follow_maximum(builder.binary_op)
        builder.ternary_op = self._follow_choice(builder.ternary_op)
        standard: Any = sys.modules["triton.language.standard"]
        if hasattr(standard, "sort_impl"):  # what tl.sort and tl.topk call
            standard.sort_impl = self._follow_sort(standard.sort_impl)

    def _follow_maximum(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A maximum over a loop: padding of a load against data of the same load."""

        def binary_op(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
            result = original(builder, lhs, rhs, op)
            if op not in _SIGN or KEY not in result.attr or is_bf16(result):
                return result
            for kept, term in ((lhs, rhs), (rhs, lhs)):
                if status_of(term).mask in status_of(kept).loads:
                    doubt = _of_maximum(_SIGN[op], kept, term, result, self.place(), self.worst)
                    if doubt is not None:
                        add(result, doubt)
            return result

        return binary_op

    def _follow_choice(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`tl.where(v > best, v, best)`: what decides is made of padding and data, and padding is taken for data."""

        def ternary_op(builder: Any, condition: Any, yes: Any, no: Any, op: Any) -> Any:
            result = original(builder, condition, yes, no, op)
            decides = status_of(condition)
            if op is not np.where or KEY not in result.attr or is_bf16(result) or not np.any(decides.filled):
                return result
            shape = result.data.shape
            for taken, lanes, other in ((yes, condition.data, no), (no, ~condition.data, yes)):
                padding, data = status_of(taken), status_of(other)
                if padding.mask not in data.loads:
                    continue
                lost = np.broadcast_to(lanes & padding.padding & data.data & decides.filled, shape)
                right = np.where(lost, np.broadcast_to(other.data, shape), result.data)
                lost = lost & (right != result.data)
                if lost.any():
                    words = f"{padding.words} are {float(result.data[lost].flat[0]):g} here and taken instead of others"
                    remedy = "other=… with what is never taken, or the mask in the condition"
                    add(result, Doubt(place=self.place(), words=words, remedy=remedy, both=(result.data, right)))
            return result

        return ternary_op

    def _follow_sort(self, original: Any) -> Callable[..., Any]:
        """Triton sorts by exchanging bits of neighbours, which says nothing of whose lane is where: the whole sort is
        one step here."""

        @functools.wraps(original)
        def sort(x: Any, k: Any = None, dim: Any = None, descending: Any = False) -> Any:
            value = x.handle
            status = status_of(value)
            if KEY not in value.attr:
                return original(x, k, dim, descending)

            def again(data: Array) -> Any:
                handle = self.interpreter.TensorHandle(data, value.dtype)
                handle.attr.update({name: known for name, known in value.attr.items() if name != KEY})
                return original(type(x)(handle, x.type), k, dim, descending)

            result = again(value.data)
            outcome = result.handle
            with unless_it_fails(outcome), self.hypothetical(), np.errstate(all="ignore"):
                sign = 1 if getattr(descending, "value", descending) else -1
                one = _Sort(place=self.place(), status=status, value=value, sign=sign, width=outcome.data.shape[-1])
                outcome.attr[KEY] = one.moved()
                for doubt in status.doubts:
                    pair = [again(np.ascontiguousarray(full(each, value))).handle.data for each in doubt.both]
                    add(outcome, replace(doubt, both=(pair[0], pair[1])))
                if (found := one.doubt(self.worst, lambda data: again(data).handle.data)) is not None:
                    add(outcome, found)
            return result

        return sort


def _of_maximum(sign: int, kept: Any, term: Any, result: Any, place: Place, worst: dict[Place, float]) -> Doubt | None:
    """A maximum of what a lane has been so far and of what comes, which is padding in some lanes: hypothetical, as
    `Reduction.doubt_extreme` is."""
    old, new, shape = status_of(kept), status_of(term), result.data.shape
    with np.errstate(all="ignore"):
        so_far, coming = (sign * np.broadcast_to(numbers(each), shape) for each in (kept, term))
        data = np.broadcast_to(old.data, shape)
        least = min(
            float(np.min(each, initial=np.inf, where=np.broadcast_to(lanes, shape) & ~np.isnan(each)))
            for each, lanes in ((so_far, old.data), (coming, new.data))
        )
        worst[place] = min(worst.get(place, np.inf), least)
        lanes = data & np.broadcast_to(new.padding, shape) & (coming > worst[place])
        if not lanes.any():
            return None
        best = float(np.max(coming, where=lanes, initial=-np.inf))
        worse = sign * below(best)
        two = np.where(data, worse, result.data).astype(result.data.dtype)
        one = np.where(lanes, sign * best, two).astype(result.data.dtype)
    return Doubt(place=place, both=(one, two), **words_of_extreme(new, sign, sign * best))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sort:
    """A sort along the last axis, or the first of it; `sign` is -1 where it ascends."""

    place: Place
    status: Status
    value: Any
    sign: int
    width: int

    def moved(self) -> Status:
        """Each lane's status goes where the lane goes."""
        key = -self.sign * numbers(self.value)
        at = np.lexsort((full(self.status.padding, self.value), key), axis=-1)[..., : self.width]
        lanes: dict[str, Any] = {
            name: np.take_along_axis(full(getattr(self.status, name), self.value), at, axis=-1)
            for name in ("filled", "data", "shared")
        }
        return replace(self.status, **lanes, doubts=())

    def doubt(self, worst: dict[Place, float], again: Callable[[Array], Array]) -> Doubt | None:
        """Hypothetical, as `Reduction.doubt_extreme` is: all data are behind the padding."""
        if is_bf16(self.value):
            return None
        data = self.value.data
        x, padding = self.sign * numbers(self.value), full(self.status.padding, self.value)
        others = full(self.status.data | self.status.shared, self.value) & ~padding
        least = float(np.min(x, initial=np.inf, where=others & ~np.isnan(x)))
        worst[self.place] = min(worst.get(self.place, np.inf), least)
        ahead = padding & (x > worst[self.place])
        if not (ahead.any() and others.any()):
            return None
        best = float(np.max(x, where=ahead, initial=-np.inf))
        worse = self.sign * min(below(best), worst[self.place])
        end = np.asarray(np.inf * -self.sign if data.dtype.kind == "f" else self._last(data.dtype))
        one = np.where(padding, data, worse).astype(data.dtype)
        two = np.where(padding, end, worse).astype(data.dtype)
        where = "ahead of what is smaller" if self.sign > 0 else "ahead of what is larger"
        return Doubt(
            place=self.place,
            words=f"{self.status.words} are {self.sign * best:g} here and sorted {where}",
            remedy=f"other={'-' if self.sign > 0 else ''}float('inf'), or tl.where(mask, …) before",
            both=(again(one), again(two)),
        )

    def _last(self, kind: Any) -> int:
        return int(np.iinfo(kind).min if self.sign > 0 else np.iinfo(kind).max)
