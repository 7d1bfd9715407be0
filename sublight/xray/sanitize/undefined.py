"""Lanes without a value: what a masked load without `other` gives where its mask is off.

Such lanes are followed through a kernel. It is a fault where a reduction or a product adds them to lanes that have a
value, and the outcome is stored. Where whole rows are masked off, their sums have no value either, and are no fault as
long as the store masks them off, too. A defined zero makes a product zero, False makes an `and` False.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sublight.xray.record import Place
from sublight.xray.sanitize.memory import Array
from sublight.xray.sanitize.offset import ELEMENTWISE, SHAPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Undefined:
    """Of each lane: it has no value, or its value is made of some that have none."""

    none: Array
    mixed: Array
    load: Place
    mixed_at: Place | None = None


@dataclass(frozen=True, slots=True)
class Lanes:
    """The builder methods that follow lanes without a value."""

    interpreter: Any
    place: Callable[[], Place]
    note: Callable[[str, Place, str], None]

    def install(self, builder: Any) -> None:
        for name in SHAPES:
            setattr(builder, name, self._follow_shape(getattr(builder, name)))
        for name in ELEMENTWISE:
            if name != "binary_op" and hasattr(builder, name):
                setattr(builder, name, self._follow_lanes(getattr(builder, name)))
        builder.binary_op = self._follow_binary(builder.binary_op)
        builder.ternary_op = self._follow_select(builder.ternary_op)
        builder.create_dot = self._follow_dot(builder.create_dot)
        builder.create_gather = self._follow_gather(builder.create_gather)
        standard: Any = sys.modules["triton.language.standard"]
        if hasattr(standard, "sort_impl"):  # what tl.sort and tl.topk call
            standard.sort_impl = self._follow_sort(standard.sort_impl)
        for kind in (self.interpreter.ReduceOps, self.interpreter.ScanOps):
            kind.apply_impl = self._follow_reduction(kind.apply_impl, is_scan=kind is self.interpreter.ScanOps)

    def masked_off(self, result: Any, lanes: Array) -> None:
        """A load without `other` gave this, and these lanes touched memory."""
        if not lanes.all():
            result.attr["undefined"] = Undefined(none=~lanes, mixed=np.zeros(lanes.shape, bool), load=self.place())

    def stored(self, value: Any, lanes: Array) -> None:
        """These lanes of a value go to memory."""
        known = value.attr.get("undefined")
        if known is None or known.mixed_at is None or not (np.broadcast_to(known.mixed, lanes.shape) & lanes).any():
            return
        where = f"line {known.mixed_at.line}" if known.mixed_at.line != known.load.line else "this line"
        detail = (
            f"lanes that this load's mask leaves out have no value, and {where} takes them in with the others, for "
            f"what line {self.place().line} stores: give the load other=…, or use tl.where before"
        )
        self.note("undefined-lanes", known.load, detail)

    def _put(self, result: Any, sources: list[Undefined], none: Array, mixed: Array) -> None:
        """Keep it with a result, unless every lane has a value again."""
        shape = result.data.shape
        none, mixed = np.broadcast_to(none, shape), np.broadcast_to(mixed, shape)
        if none.any() or mixed.any():
            at = next((each.mixed_at for each in sources if each.mixed_at), None)
            result.attr["undefined"] = Undefined(none=none, mixed=mixed, load=sources[0].load, mixed_at=at)

    def _follow_lanes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def elementwise(builder: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(builder, *args, **kwargs)
            if sources := self._known(args):
                none, mixed = (_any(each, sources) for each in ("none", "mixed"))
                self._put(result, sources, none, mixed)
            return result

        return elementwise

    def _known(self, args: Any) -> list[Undefined]:
        known = []
        for each in args:
            if isinstance(each, list | tuple):  # of what libdevice takes
                known += self._known(each)
            elif isinstance(each, self.interpreter.TensorHandle) and "undefined" in each.attr:
                known.append(each.attr["undefined"])
        return known

    def _follow_binary(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def binary_op(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
            result = original(builder, lhs, rhs, op)
            sources = self._known((lhs, rhs))
            if not sources:
                return result
            decided: Any = np.False_  # by the other side alone
            for side in (lhs, rhs):
                if op in (np.multiply, np.bitwise_and):
                    decided = decided | (_has_value(side) & (side.data == 0))
                elif op is np.bitwise_or and side.data.dtype == np.bool_:
                    decided = decided | (_has_value(side) & side.data)
            self._put(result, sources, _any("none", sources) & ~decided, _any("mixed", sources) & ~decided)
            return result

        return binary_op

    def _follow_select(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ternary_op(builder: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
            result = original(builder, lhs, rhs, other, op)
            sources = self._known((lhs, rhs, other))
            if not sources:
                return result
            if op is np.where:
                of_condition = self._known((lhs,))
                parts = []
                for name in ("none", "mixed"):
                    taken = np.where(lhs.data, _part(rhs, name), _part(other, name))
                    parts.append(taken | _any(name, of_condition) if of_condition else taken)
                self._put(result, sources, *parts)
            else:
                self._put(result, sources, _any("none", sources), _any("mixed", sources))
            return result

        return ternary_op

    def _follow_shape(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def shape_op(builder: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(builder, *args, **kwargs)
            handle = self.interpreter.TensorHandle
            at = next((i for i, arg in enumerate(args) if isinstance(arg, handle)), None)
            if at is None or "undefined" not in args[at].attr:
                return result
            known = args[at].attr["undefined"]

            def moved(lanes: Array) -> Array:
                source = handle(np.ascontiguousarray(lanes), self.interpreter.tl.int1)
                done: Array = original(builder, *args[:at], source, *args[at + 1 :], **kwargs).data
                return done

            lanes = [moved(np.broadcast_to(each, args[at].data.shape)) for each in (known.none, known.mixed)]
            self._put(result, [known], *lanes)
            return result

        return shape_op

    def _follow_gather(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_gather(builder: Any, source: Any, indices: Any, axis: int) -> Any:
            result = original(builder, source, indices, axis)
            if sources := self._known((source, indices)):
                none, mixed = (
                    np.take_along_axis(_part(source, part), indices.data, axis=axis) | _part(indices, part)
                    for part in ("none", "mixed")
                )
                self._mix(result, sources, np.zeros_like(none), none | mixed)  # a lane that got another's
            return result

        return create_gather

    def _follow_sort(self, original: Any) -> Callable[..., Any]:
        """Where a lane without a value ends up nobody knows, so that every lane of its row may be it."""

        @functools.wraps(original)
        def sort(x: Any, *args: Any, **kwargs: Any) -> Any:
            known = x.handle.attr.get("undefined")
            if known is None:
                return original(x, *args, **kwargs)
            bare = self.interpreter.TensorHandle(x.handle.data, x.handle.dtype)
            bare.attr.update({name: value for name, value in x.handle.attr.items() if name != "undefined"})
            result = original(type(x)(bare, x.type), *args, **kwargs)
            every = np.asarray(known.none.all(axis=-1, keepdims=True))
            some = np.asarray((known.none | known.mixed).any(axis=-1, keepdims=True))
            self._mix(result.handle, [known], every, some & ~every)
            return result

        return sort

    def _follow_dot(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any, **named: Any) -> Any:
            result = original(builder, a, b, d, *rest, **named)
            sources = self._known((a, b))
            if not sources:
                self._put(result, found, _part(d, "none"), _part(d, "mixed")) if (found := self._known((d,))) else None
                return result
            # a term of the sum has no value where one side has none, and the other is not a zero that has one
            lacking = _product(_part(a, "none"), ~_has_value(b) | (b.data != 0))
            lacking = lacking | _product(~_has_value(a) | (a.data != 0), _part(b, "none"))
            whole = _product(_has_value(a), _has_value(b))
            mixed = (lacking & whole) | _product(_part(a, "mixed"), np.ones(b.data.shape, bool))
            mixed = mixed | _product(np.ones(a.data.shape, bool), _part(b, "mixed")) | _part(d, "mixed")
            self._mix(result, [*sources, *self._known((d,))], (lacking & ~whole) | _part(d, "none"), mixed)
            return result

        return create_dot

    def _mix(self, result: Any, sources: list[Undefined], none: Array, mixed: Array) -> None:
        self._put(result, sources, none, mixed)
        known = result.attr.get("undefined")
        if known is not None and known.mixed_at is None and mixed.any():
            result.attr["undefined"] = Undefined(
                none=known.none, mixed=known.mixed, load=known.load, mixed_at=self.place()
            )

    def _follow_reduction(self, original: Callable[..., Any], *, is_scan: bool) -> Callable[..., Any]:
        def apply_impl(ops: Any, input: Any) -> Any:
            results = original(ops, input)
            sources = self._known([each.handle for each in input])
            if sources:
                shape = input[0].handle.data.shape
                none, mixed = (np.broadcast_to(_any(each, sources), shape) for each in ("none", "mixed"))
                taken = _scanned if is_scan else _reduced
                none, mixed = taken(ops, none, mixed)
                for each in results if isinstance(results, list | tuple) else (results,):
                    self._mix(
                        each.handle,
                        sources,
                        none.reshape(each.handle.data.shape),
                        mixed.reshape(each.handle.data.shape),
                    )
            return results

        return apply_impl


def _reduced(ops: Any, none: Array, mixed: Array) -> tuple[Array, Array]:
    """A row without any value has none; one that lacks some is mixed."""
    axis = ops.axis
    every, some = none.all(axis=axis), none.any(axis=axis)
    return np.asarray(every), np.asarray((some & ~every) | mixed.any(axis=axis))


def _scanned(ops: Any, none: Array, mixed: Array) -> tuple[Array, Array]:
    """Lanes behind one without a value."""
    along = (lambda lanes: np.flip(lanes, ops.axis)) if ops.reverse else (lambda lanes: lanes)
    before = along(np.logical_or.accumulate(along(none), axis=ops.axis))
    return none, (before & ~none) | along(np.logical_or.accumulate(along(mixed), axis=ops.axis))


def _product(a: Array, b: Array) -> Array:
    """Whether a row of `a` and a column of `b` meet anywhere."""
    met: Array = np.matmul(np.asarray(a, np.float32), np.asarray(b, np.float32)) > 0
    return met


def _any(part: str, sources: list[Undefined]) -> Array:
    lanes: Any = False
    for each in sources:
        lanes = lanes | getattr(each, part)
    return np.asarray(lanes)


def _part(handle: Any, part: str) -> Array:
    known = handle.attr.get("undefined")
    return np.broadcast_to(getattr(known, part), handle.data.shape) if known else np.zeros(handle.data.shape, bool)


def _has_value(handle: Any) -> Array:
    return ~(_part(handle, "none") | _part(handle, "mixed"))
