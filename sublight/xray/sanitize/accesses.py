"""The interpreter's loads, stores and atomics, each checked before it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sublight.xray.record import Place
from sublight.xray.sanitize.doubt import status_of
from sublight.xray.sanitize.launch import Launch
from sublight.xray.sanitize.memory import Array
from sublight.xray.sanitize.order import Kind
from sublight.xray.sanitize.padding import Padding
from sublight.xray.sanitize.undefined import Lanes


@dataclass(frozen=True, slots=True)
class Accesses:
    """Loads, stores and atomics, each checked before it is made."""

    interpreter: Any
    launch: Callable[[], Launch | None]  # the one that is on
    place: Callable[[], Place]  # the user's line that runs
    undefined: Lanes
    padding: Padding

    def install(self, builder: Any) -> None:
        builder.create_masked_load = self._load
        builder.create_masked_store = self._store
        builder.create_atomic_rmw = self._rmw(builder.create_atomic_rmw)
        builder.create_atomic_cas = self._cas(builder.create_atomic_cas)
        builder.create_barrier = self._barrier(builder.create_barrier)
        builder.create_dot = self._barrier(builder.create_dot)
        builder.create_trans = self._exchange(builder.create_trans)
        builder.create_gather = self._exchange(builder.create_gather)
        for kind in (self.interpreter.ReduceOps, self.interpreter.ScanOps):
            kind.apply_impl = self._barrier(kind.apply_impl)
        if hasattr(builder, "create_atomic_store"):  # Triton 3.9
            builder.create_atomic_store = lambda _, ptr, val, mask, sem, *rest: self._put(
                "atomic store", ptr, val, mask, acquires=False, releases=self._does(sem, "RELEASE")
            )
            builder.create_atomic_load = self._atomic_load

    def _barrier(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            if launch := self.launch():
                launch.barriers.reached(launch.event)
            return original(*args, **kwargs)

        return method

    def _exchange(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Threads hand each other what they have loaded, so that all of them have."""

        def method(*args: Any, **kwargs: Any) -> Any:
            if launch := self.launch():
                launch.barriers.read_since = launch.event
            return original(*args, **kwargs)

        return method

    def _does(self, sem: Any, half: str) -> bool:
        """Whether an atomic's ordering is ACQUIRE, or RELEASE, or both."""
        kinds = self.interpreter._ir.MEM_SEMANTIC
        return sem in (kinds.ACQUIRE_RELEASE, getattr(kinds, half))

    def _access(self, kind: Kind, ptr: Any, mask: Any, size: int, **more: Any) -> tuple[Array, Array]:
        launch = self.launch()
        assert launch is not None
        place = self.place()
        lanes = np.broadcast_to(_data(mask), ptr.data.shape).astype(bool)
        if stray := ptr.attr.get("strayed"):
            wrong = lanes & np.broadcast_to(stray.lanes, lanes.shape)
            if wrong.any():
                detail = (
                    f"an int32 offset wraps here: {stray.exact:,} becomes {stray.got:,}, and line {place.line} uses it "
                    f"({int(wrong.sum())} lanes of program {launch.index}): make it int64 before this"
                )
                launch.notes.add("offset-overflow", launch.kernel, stray.place, detail)
                lanes = lanes & ~wrong
        if known := getattr(mask, "attr", {}).get("wrapped"):
            wrong = _data(mask) != known.exact
            if not stray and wrong.any():
                detail = (
                    f"{known.words()}, and the mask of line {place.line} is wrong by it ({int(wrong.sum())} lanes of "
                    f"program {launch.index}): make it int64 before this"
                )
                launch.notes.add("offset-overflow", launch.kernel, known.place, detail)
        return launch.access(kind, ptr.data, lanes, size, place, **more)

    def _atomic_load(self, _: Any, ptrs: Any, mask: Any, sem: Any, *scope: Any) -> Any:
        return self._load(ptrs, mask, None, is_volatile=True, acquires=self._does(sem, "ACQUIRE"))

    def _load(self, ptrs: Any, mask: Any, other: Any, *policy: Any, acquires: bool = True, **named: Any) -> Any:
        kind = ptrs.get_element_ty()
        element = self.interpreter._get_np_dtype(kind)
        is_volatile = named.get("is_volatile", policy[-1] if policy else False)
        how: Kind = "atomic load" if is_volatile else "load"
        true, lanes = self._access(how, ptrs, mask, element.itemsize, acquires=acquires, releases=False)
        filler = np.zeros(ptrs.data.shape, element) if other is None else other.data
        result = self.interpreter.TensorHandle(self.interpreter._interpreter.load(true, lanes, filler, element), kind)
        wanted = np.broadcast_to(_data(mask), ptrs.data.shape).astype(bool)
        if other is None:
            self.undefined.masked_off(result, wanted)
        self.padding.loaded(result, wanted, other, self.place())
        return result

    def _store(self, ptrs: Any, value: Any, mask: Any, *policy: Any, **named: Any) -> Any:
        return self._put("store", ptrs, value, mask)

    def _put(self, kind: Kind, ptrs: Any, value: Any, mask: Any, **ordering: bool) -> Any:
        self._check(value, np.broadcast_to(_data(mask), ptrs.data.shape).astype(bool))
        element = self.interpreter._get_np_dtype(ptrs.get_element_ty())
        data = value.data if value.data.dtype.itemsize == element.itemsize else value.data.astype(element)
        true, lanes = self._access(
            kind,
            ptrs,
            mask,
            element.itemsize,
            values=data,
            current=lambda at: self._peek(at, data.dtype),
            sources=status_of(value).loads,
            **ordering,
        )
        return self.interpreter._interpreter.store(true, data, lanes)

    def _check(self, value: Any, lanes: Array) -> None:
        """Before these lanes of a value go to memory."""
        self.undefined.stored(value, lanes)
        self.padding.stored(value, lanes)

    def _peek(self, addresses: Array, kind: Any) -> Array:
        addresses = np.ascontiguousarray(addresses)
        yes, filler = np.ones(addresses.shape, bool), np.zeros(addresses.shape, kind)
        got: Array = self.interpreter._interpreter.load(addresses, yes, filler, kind)
        return got

    def _rmw(self, original: Callable[..., Any]) -> Callable[..., Any]:
        ops = self.interpreter._ir.ATOMIC_OP

        def create_atomic_rmw(builder: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
            kind = ptr.get_element_ty()
            size = self.interpreter._get_np_dtype(kind).itemsize
            self._check(val, np.broadcast_to(_data(mask), ptr.data.shape).astype(bool))
            true, lanes = self._access(
                "atomic",
                ptr,
                mask,
                size,
                reads=op != ops.XCHG,
                is_float_add=op == ops.FADD and kind.is_floating(),
                acquires=self._does(sem, "ACQUIRE"),
                releases=self._does(sem, "RELEASE"),
            )
            handle = self.interpreter.TensorHandle
            if not lanes.any():
                return handle(np.zeros(val.data.shape, val.data.dtype), val.dtype.scalar)
            return original(builder, op, handle(true, ptr.dtype), val, handle(lanes, mask.dtype), sem, scope)

        return create_atomic_rmw

    def _cas(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_atomic_cas(builder: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
            size = self.interpreter._get_np_dtype(ptr.get_element_ty()).itemsize
            everywhere = self.interpreter.TensorHandle(np.ones(ptr.data.shape, bool), self.interpreter.tl.int1)
            how = {"acquires": self._does(sem, "ACQUIRE"), "releases": self._does(sem, "RELEASE")}
            true, lanes = self._access("atomic", ptr, everywhere, size, **how)
            handle = self.interpreter.TensorHandle
            if not lanes.all():  # it has no mask of its own; what it would compare is not there
                return handle(cmp.data.copy(), cmp.dtype.scalar)
            result = original(builder, handle(true, ptr.dtype), cmp, val, sem, scope)
            if lanes.size == 1 and (launch := self.launch()):
                expected, put, before = (int(each.data.reshape(-1)[0]) for each in (cmp, val, result))
                place = self.place()
                launch.order.compared(int(true.reshape(-1)[0]), place, expected=expected, put=put, before=before)
            return result

        return create_atomic_cas


def _data(mask: Any) -> Array:
    return np.asarray(mask if isinstance(mask, np.ndarray) else mask.data)  # Triton 3.6 passes bare arrays at times
