"""Lanes that a mask leaves out and `other` fills: where they change a sum, a product or a maximum that is stored.

`other=0.0` is right for a sum of the lanes themselves, wrong for a sum of what is made of them: (0 - mean)² is not 0.
So each lane is followed: it is *padding* where it is made of filled lanes and of what all lanes share, *data* where
something loaded is in it. A reduction over both is in doubt where the padding is not neutral:

- a sum, where a lane of padding is not 0: the sum would be another without it;
- a maximum or minimum, where the padding is beyond some lane of data: a row of such lanes alone would lose to it.

- a sort: likewise, where the padding is ahead of some lane of data.

An accumulator over a loop is a reduction, too: of the lane that it has been so far and of the one that comes.

What a value in doubt would be with the padding and without is computed along with it, op by op, down to the store. The
two must differ there: a softmax whose maximum is too large stores the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sublight.xray.record import Place
from sublight.xray.sanitize import doubt as doubts
from sublight.xray.sanitize.doubt import (
    KEY,
    NO,
    YES,
    Doubt,
    Reduction,
    Status,
    add,
    full,
    is_bf16,
    merged,
    status_of,
    unless_it_fails,
)
from sublight.xray.sanitize.extremes import Extremes
from sublight.xray.sanitize.memory import Array
from sublight.xray.sanitize.offset import ELEMENTWISE, SHAPES

SUM = "_sum_combine"
SIGN = {"_elementwise_max": 1, "_elementwise_min": -1, "_argmax_combine": 1, "_argmin_combine": -1}
MOST_DOUBTS = 4  # that are followed at a time


@dataclass(frozen=True, slots=True)
class Padding:
    """The builder methods that follow padding. `hypothetical` is entered for ops on values that are not real."""

    interpreter: Any
    place: Callable[[], Place]
    note: Callable[[str, Place, str], None]
    hypothetical: Callable[[], contextlib.AbstractContextManager[None]]
    whole: dict[Place, Status] = field(default_factory=dict)  # by load: where no lane is left out
    worst: dict[Place, float] = field(default_factory=dict)  # by maximum: the lane of data that is the first to lose

    def install(self, builder: Any) -> None:
        known = {*SHAPES, *ELEMENTWISE, "create_dot"}
        for name in filter(lambda name: name.startswith("create_") and name not in known, dir(builder)):
            if not _calls_what_is_followed(original := getattr(builder, name)):
                setattr(builder, name, self._follow_unknown(original))
        for name in SHAPES:
            rule = self._spread if name in ("create_broadcast", "create_splat") else self._moved
            setattr(builder, name, self._follow(getattr(builder, name), rule))
        for name in ELEMENTWISE:
            if hasattr(builder, name):
                setattr(builder, name, self._follow(getattr(builder, name), self._merged))
        builder.binary_op = self._follow_sum(builder.binary_op)
        builder.ternary_op = self._follow(builder.ternary_op, self._selected)
        Extremes(self.interpreter, self.place, self.hypothetical, self.worst).install(builder)
        builder.create_dot = self._follow_dot(builder.create_dot)
        reduce, scan = self.interpreter.ReduceOps, self.interpreter.ScanOps
        reduce.apply_impl = self._follow_reduction(reduce.apply_impl)
        scan.apply_impl = self._follow_scan(scan.apply_impl)

    def loaded(self, result: Any, lanes: Array, other: Any, place: Place) -> None:
        """A load gave this: these lanes from memory, the others from `other`, where there is one."""
        if other is None or lanes.all():
            known = self.whole.get(place)
            if known is None:
                known = self.whole[place] = Status(data=YES, loads=frozenset([place]))
            result.attr[KEY] = known
            return
        filler = float(np.broadcast_to(doubts.numbers(other), lanes.shape).flat[int(np.argmin(lanes))])
        result.attr[KEY] = Status(filled=~lanes, data=lanes, loads=frozenset([place]), mask=place, filler=filler)

    def stored(self, value: Any, lanes: Array) -> None:
        """These lanes of a value go to memory."""
        for doubt in status_of(value).doubts:
            if doubt.shows(value, lanes):
                detail = f"{doubt.words}; line {self.place().line} stores what comes of it: {doubt.remedy}"
                self.note("padded-lanes", doubt.place, detail)

    # ops

    def _follow(self, original: Callable[..., Any], rule: Callable[..., Status]) -> Callable[..., Any]:
        def op(builder: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(builder, *args, **kwargs)
            sources = self._sources(args)
            if sources:

                def again(*changed: Any) -> Any:
                    return original(builder, *changed, **kwargs)

                with unless_it_fails(result):
                    status = rule(args, again, sources)
                    in_doubt = any(each.doubts for each in sources)
                    if in_doubt or status.doubts:
                        status = replace(status, doubts=self._in_doubt(args, again))
                    result.attr[KEY] = status
            return result

        return op

    def _in_doubt(self, args: tuple[Any, ...], again: Callable[..., Any]) -> tuple[Doubt, ...]:
        """The op on both values of each doubt about its arguments."""
        known = {doubt.place: doubt for each in self._handles(args) for doubt in status_of(each).doubts}
        made = []
        for doubt in list(known.values())[:MOST_DOUBTS]:
            with self.hypothetical(), np.errstate(all="ignore"):
                one, two = (again(*self._replaced(args, doubt.place, which)).data for which in (0, 1))
            made.append(replace(doubt, both=(one, two)))
        return tuple(made)

    def _replaced(self, args: tuple[Any, ...], place: Place, which: int) -> list[Any]:
        def one(arg: Any) -> Any:
            if isinstance(arg, list | tuple):
                return type(arg)(map(one, arg))
            if isinstance(arg, self.interpreter.TensorHandle):
                doubt = next((doubt for doubt in status_of(arg).doubts if doubt.place == place), None)
                return self.interpreter.TensorHandle(doubt.both[which], arg.dtype) if doubt else arg
            return arg

        return [one(arg) for arg in args]

    def _sources(self, args: Any) -> list[Status]:
        """What is known of these arguments."""
        sources = []
        for arg in args:
            if isinstance(arg, self.interpreter.TensorHandle):
                if KEY in arg.attr:
                    sources.append(arg.attr[KEY])
            elif isinstance(arg, list | tuple):
                sources += self._sources(arg)
        return sources

    def _handles(self, args: Any) -> list[Any]:
        handles = []
        for arg in args:
            if isinstance(arg, self.interpreter.TensorHandle):
                handles.append(arg)
            elif isinstance(arg, list | tuple):
                handles += self._handles(arg)
        return handles

    def _merged(self, args: tuple[Any, ...], again: Callable[..., Any], sources: list[Status]) -> Status:
        return sources[0] if len(sources) == 1 else merged(sources)

    def _selected(self, args: tuple[Any, ...], again: Callable[..., Any], sources: list[Status]) -> Status:
        condition, yes, no, op = args
        if op is not np.where:
            return self._merged(args, again, sources)
        taken, lanes = [status_of(each) for each in (yes, no)], condition.data
        chosen = {
            name: np.where(lanes, *(np.broadcast_to(getattr(each, name), lanes.shape) for each in taken))
            for name in ("filled", "data", "shared")
        }
        return merged([replace(merged(taken), **chosen), status_of(condition)])

    def _moved(self, args: tuple[Any, ...], again: Callable[..., Any], sources: list[Status]) -> Status:
        handle = self.interpreter.TensorHandle
        at = next(i for i, arg in enumerate(args) if isinstance(arg, handle))
        status, moved = status_of(args[at]), {}
        for name in ("filled", "data", "shared"):
            lanes = getattr(status, name)
            if lanes.ndim:
                lanes = np.ascontiguousarray(np.broadcast_to(lanes, args[at].data.shape))
                source = handle(lanes, self.interpreter.tl.int1)
                moved[name] = again(*args[:at], source, *args[at + 1 :]).data.astype(bool)
        return replace(status, **moved) if moved else status

    def _spread(self, args: tuple[Any, ...], again: Callable[..., Any], sources: list[Status]) -> Status:
        """One lane for many: a mean that was loaded is no lane's own data."""
        status = self._moved(args, again, sources)
        return replace(status, data=NO, shared=status.shared | status.data)

    def _follow_sum(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An accumulator over a loop: padding of a load is added to data of the same load."""

        def binary_op(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
            result = original(builder, lhs, rhs, op)
            if op is not np.add or KEY not in result.attr or is_bf16(result):
                return result
            for kept, term in ((lhs, rhs), (rhs, lhs)):
                old, new = status_of(kept), status_of(term)
                if new.mask not in old.loads or new.filler != 0:
                    continue
                shape = result.data.shape
                lanes = np.broadcast_to(old.data & new.padding, shape) & (np.broadcast_to(term.data, shape) != 0)
                if lanes.any():
                    right, example = np.broadcast_to(kept.data, shape), np.broadcast_to(term.data, shape)[lanes].flat[0]
                    how = "are added to others"
                    add(result, doubts.of_sum(new, example, how, self.place(), result.data, right, lanes))
            return result

        return binary_op

    def _follow_dot(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any, **named: Any) -> Any:
            result = original(builder, a, b, d, *rest, **named)
            if not any(KEY in each.attr for each in (a, b, d)):
                return result
            with unless_it_fails(result):
                known = self._in_doubt((a, b, d, *rest), lambda *changed: original(builder, *changed, **named))
                self._multiplied(a, b, d, result, known)
            return result

        return create_dot

    def _multiplied(self, a: Any, b: Any, d: Any, result: Any, known: tuple[Doubt, ...]) -> None:
        """Padding is a row or column of it that is made of nothing else."""
        left, right, added = (status_of(each) for each in (a, b, d))
        rows, columns = full(left.padding, a).all(axis=-1), full(right.padding, b).all(axis=-2)
        padding = rows[..., :, None] | columns[..., None, :]
        rows, columns = full(left.data | left.shared, a), full(right.data | right.shared, b)
        data = (rows.any(axis=-1)[..., :, None] | columns.any(axis=-2)[..., None, :]) & ~padding
        parts = [replace(each, filled=NO, data=NO, shared=NO) for each in (right, left)]
        result.attr[KEY] = replace(merged([*parts, Status(filled=padding, data=data), added]), doubts=known)
        if not is_bf16(result):
            self._doubt_product(a, b, result, data)

    def _doubt_product(self, a: Any, b: Any, result: Any, rows: Array) -> None:
        """Terms of a product's sums that padding makes alone, and that are not 0."""
        left, right = status_of(a), status_of(b)
        if not (left.padding.any() or right.padding.any()):
            return
        with np.errstate(all="ignore"):
            x, y = np.nan_to_num(doubts.numbers(a)), np.nan_to_num(doubts.numbers(b))
            extra = np.matmul(np.where(left.padding, x, 0), np.where(right.data, 0, y))
            extra = extra + np.matmul(np.where(left.data | left.padding, 0, x), np.where(right.padding, y, 0))
        without = result.data - extra.astype(result.data.dtype)
        lanes = rows & (without != result.data)
        if lanes.any():
            status, how = left if left.padding.any() else right, "add to this product's sums"
            example = extra[lanes].flat[0]
            add(result, doubts.of_sum(status, example, how, self.place(), result.data, without, lanes))

    def _follow_unknown(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What no rule above knows gives data: nothing is held against it."""

        def op(builder: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(builder, *args, **kwargs)
            for each in self._handles([result]):
                if KEY not in each.attr and any(KEY in arg.attr for arg in self._handles(args)):
                    each.attr[KEY] = Status(data=YES)
            return result

        return op

    def _follow_scan(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def apply_impl(ops: Any, input: Any) -> Any:
            results = original(ops, input)
            for each in _handles_of(results):
                each.attr[KEY] = Status(data=YES)
            return results

        return apply_impl

    def _follow_reduction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def apply_impl(ops: Any, input: Any) -> Any:
            results = original(ops, input)
            if any(KEY in each.handle.attr for each in input):
                value, outcomes = input[0].handle, _handles_of(results)

                def again(data: Array) -> list[Array]:
                    handle = self.interpreter.TensorHandle(data, value.dtype)
                    with self.hypothetical(), np.errstate(all="ignore"):
                        done = original(ops, (type(input[0])(handle, input[0].type), *input[1:]))
                    return [each.data for each in _handles_of(done)]

                with unless_it_fails(*outcomes):
                    self._reduced(_name_of(ops), ops.axis, value, outcomes, again)
            return results

        return apply_impl

    def _reduced(
        self, name: str, axis: int | None, value: Any, outcomes: list[Any], again: Callable[[Array], list[Array]]
    ) -> None:
        if name not in SIGN and name != SUM and len(outcomes) > 1:
            for each in outcomes:
                each.attr[KEY] = Status(data=YES)
            return
        status = status_of(value)
        one = Reduction(place=self.place(), status=status, value=value, outcomes=outcomes, axis=axis, again=again)
        shared, filled = one.rows(one.others), one.rows(one.padding)
        for each in outcomes:
            each.attr[KEY] = Status(filled=filled & ~shared, shared=shared, mask=status.mask, filler=status.filler)
        for doubt in status.doubts:
            both = [again(np.ascontiguousarray(full(each, value))) for each in doubt.both]
            for each, pair in zip(outcomes, zip(*both, strict=True), strict=True):
                add(each, replace(doubt, both=pair))
        if (shared & filled).any() and not is_bf16(value):
            if name in SIGN:
                new_doubts = one.doubt_extreme(SIGN[name], self.worst)
            else:
                new_doubts = one.doubt_sum() if name == SUM else one.doubt_combined()
            for each, doubt in zip(outcomes, new_doubts, strict=False):
                add(each, doubt)


def _calls_what_is_followed(op: Any) -> bool:
    """Such as create_fadd: it calls binary_op, and gives what that gives."""
    return bool({"binary_op", "unary_op", "ternary_op", "cast_impl"} & set(op.__code__.co_names))


def _handles_of(results: Any) -> list[Any]:
    return [each.handle for each in (results if isinstance(results, list | tuple) else (results,))]


def _name_of(ops: Any) -> str:
    name = str(getattr(ops.combine_fn, "__name__", ""))
    return name.removesuffix("_tie_break_left").removesuffix("_tie_break_fast")


@contextlib.contextmanager
def quiet(watch: Any) -> Iterator[None]:
    """No note is taken of what happens to values that are not real."""
    launch, watch.launch = watch.launch, None
    try:
        yield
    finally:
        watch.launch = launch
