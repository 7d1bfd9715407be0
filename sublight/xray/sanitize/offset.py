"""Offsets that do not fit into 32 bits: beside an integer that wrapped, the one it should have been is kept.

Only where such an integer moves a pointer that is then used, or decides in a mask which lanes use it, or ends a loop,
is it a fault: a hash may wrap. So what has
been through a remainder, a mask of bits or a shift to the right is an offset of its own; unsigned integers may wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sublight.xray.record import Place
from sublight.xray.sanitize.memory import Array

_EXACT_OPS = (np.add, np.subtract, np.multiply, np.left_shift, np.minimum, np.maximum)
_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
_LOGICAL = (*_COMPARISONS, np.bitwise_and, np.bitwise_or, np.bitwise_xor)
SHAPES = (
    "create_reshape",
    "create_expand_dims",
    "create_broadcast",
    "create_trans",
    "create_splat",
    "create_unsplat",
)
ELEMENTWISE = (
    "unary_op", "binary_op", "cast_impl", "create_fp_to_fp", "create_bitcast", "create_fma", "create_fabs",
    "create_rsqrt", "create_erf", "create_idiv", "create_ashr", "create_umulhi", "create_clampf",
    "create_extern_elementwise",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wrapped:
    """What an integer tensor, or a comparison of one, should have held, and the line where it ceased to."""

    exact: Array
    place: Place
    example: tuple[int, int]  # the first that wrapped: what it should have been, what it became

    def words(self) -> str:
        return "an int32 number wraps here: {:,} becomes {:,}".format(*self.example)


@dataclass(frozen=True, slots=True)
class Strayed:
    """Which lanes of a pointer were moved by an offset that wrapped."""

    lanes: Array
    place: Place
    exact: int  # of the first such lane
    got: int


@dataclass(frozen=True, slots=True)
class Offsets:
    """The builder methods that follow integers."""

    interpreter: Any
    place: Callable[[], Place]

    def install(self, builder: Any) -> None:
        for name in SHAPES:
            setattr(builder, name, self._follow_shape(getattr(builder, name)))
        builder.binary_op = self._follow_binary(builder.binary_op)
        builder.create_idiv = self._follow_division(builder.create_idiv)
        builder.ternary_op = self._follow_select(builder.ternary_op)
        builder.cast_impl = self._follow_cast(builder.cast_impl)
        builder.create_addptr = self._follow_addptr(builder.create_addptr)

    def _exact(self, handle: Any) -> Array:
        known = handle.attr.get("wrapped")
        exact: Array = handle.data if handle.data.dtype == np.bool_ else handle.data.astype(np.int64)
        return known.exact if known else exact

    def _mark(self, result: Any, exact: Array, *sources: Any) -> None:
        """Keep the exact value where it is another than the one at hand."""
        if result.data.dtype.itemsize >= 8 and not any("wrapped" in source.attr for source in sources):
            return
        exact = np.broadcast_to(exact, result.data.shape)
        wrong = exact != result.data
        if wrong.any():
            known = next((source.attr["wrapped"] for source in sources if "wrapped" in source.attr), None)
            result.attr["wrapped"] = Wrapped(
                exact,
                known.place if known else self.place(),
                known.example if known else (int(exact[wrong][0]), int(result.data[wrong][0])),
            )

    def _follow_binary(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def binary_op(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
            result = original(builder, lhs, rhs, op)
            if op in _EXACT_OPS and _is_integer(lhs) and _is_integer(rhs) and result.data.dtype.kind == "i":
                wide = lhs.data.dtype.itemsize >= 8
                if not wide or "wrapped" in lhs.attr or "wrapped" in rhs.attr:
                    with np.errstate(all="ignore"):
                        self._mark(result, op(self._exact(lhs), self._exact(rhs)), lhs, rhs)
            elif ("wrapped" in lhs.attr or "wrapped" in rhs.attr) and op in _LOGICAL and result.data.dtype == np.bool_:
                self._mark(result, op(self._exact(lhs), self._exact(rhs)), lhs, rhs)
            return result

        return binary_op

    def _follow_division(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_idiv(builder: Any, lhs: Any, rhs: Any) -> Any:
            result = original(builder, lhs, rhs)
            if "wrapped" in lhs.attr:
                exact, by = self._exact(lhs), self._exact(rhs)
                self._mark(result, (exact - np.fmod(exact, by)) // by, lhs)
            return result

        return create_idiv

    def _follow_select(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ternary_op(builder: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
            result = original(builder, lhs, rhs, other, op)
            if op is np.where and ("wrapped" in rhs.attr or "wrapped" in other.attr):
                self._mark(result, np.where(lhs.data, self._exact(rhs), self._exact(other)), rhs, other)
            if op is np.where and (moved := rhs.attr.get("strayed") or other.attr.get("strayed")):
                lanes = np.where(lhs.data, _lanes(rhs), _lanes(other))
                result.attr["strayed"] = Strayed(lanes, moved.place, moved.exact, moved.got)
            return result

        return ternary_op

    def _follow_cast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def cast_impl(builder: Any, src: Any, dst_type: Any) -> Any:
            result = original(builder, src, dst_type)
            if "wrapped" in src.attr and dst_type.scalar.is_int():
                self._mark(result, src.attr["wrapped"].exact, src)
            return result

        return cast_impl

    def _follow_shape(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def shape_op(builder: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(builder, *args, **kwargs)
            at = next((i for i, arg in enumerate(args) if isinstance(arg, self.interpreter.TensorHandle)), None)
            if at is None or not args[at].attr:
                return result
            source, kinds = args[at], self.interpreter.tl

            def moved(data: Array, kind: Any) -> Array:
                handle = self.interpreter.TensorHandle(data, kind)
                done: Array = original(builder, *args[:at], handle, *args[at + 1 :], **kwargs).data
                return done

            if known := source.attr.get("wrapped"):
                kind = kinds.int1 if known.exact.dtype == np.bool_ else kinds.int64
                result.attr["wrapped"] = Wrapped(moved(known.exact, kind), known.place, known.example)
            if stray := source.attr.get("strayed"):
                result.attr["strayed"] = Strayed(moved(stray.lanes, kinds.int1), stray.place, stray.exact, stray.got)
            return result

        return shape_op

    def _follow_addptr(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_addptr(builder: Any, ptr: Any, offset: Any) -> Any:
            result = original(builder, ptr, offset)
            before, known = ptr.attr.get("strayed"), offset.attr.get("wrapped")
            if known is not None:
                lanes = np.broadcast_to(known.exact != offset.data, result.data.shape)
                if lanes.any():
                    first = int(np.flatnonzero(lanes.reshape(-1))[0])
                    exact = np.broadcast_to(known.exact, result.data.shape).reshape(-1)[first]
                    got = np.broadcast_to(offset.data, result.data.shape).reshape(-1)[first]
                    lanes = lanes | (before.lanes if before else False)
                    result.attr["strayed"] = Strayed(lanes, known.place, int(exact), int(got))
                    return result
            if before is not None:
                lanes = np.broadcast_to(before.lanes, result.data.shape)
                result.attr["strayed"] = Strayed(lanes, before.place, before.exact, before.got)
            return result

        return create_addptr


def _is_integer(handle: Any) -> bool:
    return bool(handle.data.dtype.kind == "i" and handle.dtype.scalar.is_int())


def _lanes(handle: Any) -> Array:
    stray = handle.attr.get("strayed")
    return stray.lanes if stray else np.zeros(handle.data.shape, bool)
