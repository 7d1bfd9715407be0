"""bfloat16 as a GPU computes it, for Triton's interpreter.

The interpreter keeps bf16 as 16-bit integers and then adds, compares and multiplies those integers; it also cuts fp32
off where a GPU rounds to nearest even. Here each operation widens to fp32, computes, and rounds once: a sum or product
of two bf16 numbers, rounded to fp32 first and to bf16 then, is the correctly rounded one (24 bits >= 2 * 8 + 2), which
is what add.bf16 and fma.bf16 give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sublight.xray.record import Place
from sublight.xray.sanitize import fp8
from sublight.xray.sanitize.memory import Array

MMA_K = 16  # products that one instruction of the tensor cores adds up
LONG_SUM = 4  # additions into one bf16 accumulator that are a loop's, not an expression's


def widen(bits: Array) -> Array:
    """bf16 -> fp32, exactly.

    >>> widen(np.array([0x3F80, 0xC000], np.uint16)).tolist()
    [1.0, -2.0]
    """
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: Array, *, truncate: bool = False) -> Array:
    """fp32 -> bf16, to nearest even; a NaN stays one.

    >>> [hex(bits) for bits in narrow(np.array([1.0, 1.00390625, 1.01171875, 3.4e38, np.nan], np.float32))]
    ['0x3f80', '0x3f80', '0x3f82', '0x7f80', '0x7fff']
    """
    shape = np.shape(values)  # of which the next line makes a row, where it is a single number
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    bias = np.uint32(0) if truncate else np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    with np.errstate(over="ignore"):
        rounded = ((bits + bias) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded).reshape(shape)


def added(bits: Array, axis: int | None, *, keep: bool = False) -> Array:
    """A sum of bf16, in pairs, each rounded, as lanes and warps add.

    >>> widen(added(narrow(np.ones((2, 512), np.float32)), 1)).tolist()
    [512.0, 512.0]
    """
    shape = bits.shape
    values = np.moveaxis(widen(bits), axis, 0) if axis is not None else widen(bits).reshape(-1)
    while len(values) > 1:
        half = len(values) // 2
        pairs = widen(narrow(values[:half] + values[half : 2 * half]))
        values = np.concatenate([pairs, values[2 * half :]])
    total = narrow(values[0])
    if not keep:
        return total
    return total.reshape([1 if axis is None or place == axis % len(shape) else n for place, n in enumerate(shape)])


def running(bits: Array, axis: int, op: Callable[[Array, Array], Array]) -> Array:
    """A running sum or product of bf16, rounded at each step."""
    values = np.moveaxis(widen(bits), axis, 0).copy()
    for place in range(1, len(values)):
        values[place] = widen(narrow(op(values[place - 1], values[place])))
    return narrow(np.moveaxis(values, 0, axis))


def by_tensor_cores(left: Array, right: Array, total: Array) -> Array:
    """`total` plus the product of 16-bit matrices: the tensor cores add up sixteen products at a time.

    One after another they would round as often as there are products, and be twice as far off as PyTorch's on a CPU.

    >>> by_tensor_cores(np.full((1, 32), 0.1, np.float16), np.ones((32, 1), np.float16), np.ones((1, 1), np.float32))
    array([[4.1992188]], dtype=float32)
    """
    wide, other = left.astype(np.float64), right.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, wide.shape[-1], MMA_K):
            pieces = wide[..., begin : begin + MMA_K] @ other[..., begin : begin + MMA_K, :]
            total = (total + pieces).astype(np.float32)
    return total


@dataclass(frozen=True, slots=True)
class Right:
    """The mended builder methods. `note(place, detail)` is told of sums that lose their small terms."""

    interpreter: Any  # the module triton.runtime.interpreter
    instruction: Callable[[], tuple[Place, int]]
    note: Callable[[str, Place, str], None]

    def install(self, builder: Any) -> None:
        """Put the mended methods over those of InterpreterBuilder."""
        for name in ("binary_op", "ternary_op", "unary_op", "cast_impl", "create_fp_to_fp", "create_fma"):
            setattr(builder, name, self._wrap(getattr(builder, name), getattr(self, name)))
        for name in ("create_dot", "create_bitcast", "create_atomic_rmw", "create_clampf"):
            setattr(builder, name, self._wrap(getattr(builder, name), getattr(self, name)))
        builder.get_bf16 = lambda _, value: self._handle(narrow(np.array([value], np.float32)))
        self._mend_reductions()

    def _mend_reductions(self) -> None:
        """Sums, maxima and running sums of bf16, of which Triton takes the integers: it gives the largest integer,
        which is a negative number, as the maximum."""
        reduce, scan = self.interpreter.ReduceOps, self.interpreter.ScanOps
        extreme, cast = reduce.min_max, self.interpreter.tl.tensor

        def min_max(ops: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
            value = input[0] if isinstance(input, tuple) else input
            if not self._is(value.handle):
                return extreme(ops, input, *args, **kwargs)
            wide = self.interpreter.TensorHandle(widen(value.handle.data), self.interpreter.tl.float32)
            kind = self.interpreter.tl.block_type(self.interpreter.tl.float32, list(value.handle.data.shape))
            extremes = extreme(ops, cast(wide, kind), *args, **kwargs)
            parts = extremes if isinstance(extremes, tuple) else (extremes,)
            back = [
                ops.to_tensor(narrow(part.handle.data), value.dtype) if part.handle.data.dtype == np.float32 else part
                for part in parts
            ]
            return tuple(back) if isinstance(extremes, tuple) else back[0]

        def mended(original: Any, compute: Callable[[Any, Array], Array], *, is_list: bool) -> Any:
            def method(ops: Any, input: Any) -> Any:
                if not self._is(input.handle):
                    return original(ops, input)
                found = ops.to_tensor(compute(ops, input.handle.data), input.dtype)
                return [found] if is_list else found

            return method

        reduce.min_max = min_max
        reduce.sum = mended(reduce.sum, lambda ops, bits: added(bits, ops.axis, keep=ops.keep_dims), is_list=False)
        scan.cumsum = mended(scan.cumsum, lambda ops, bits: running(bits, ops.axis, np.add), is_list=True)
        scan.cumprod = mended(scan.cumprod, lambda ops, bits: running(bits, ops.axis, np.multiply), is_list=True)

    @staticmethod
    def _wrap(original: Callable[..., Any], mended: Callable[..., Any]) -> Callable[..., Any]:
        def method(builder: Any, *args: Any, **kwargs: Any) -> Any:
            with np.errstate(all="ignore"):
                done = mended(builder, original, *args, **kwargs)
            return original(builder, *args, **kwargs) if done is NotImplemented else done

        return method

    def _is(self, handle: Any) -> bool:
        kind = getattr(handle, "dtype", None)
        return kind is not None and kind.scalar.name == "bf16" and handle.data.dtype == np.uint16

    def _handle(self, bits: Array) -> Any:
        return self.interpreter.TensorHandle(bits, self.interpreter.tl.bfloat16)

    def binary_op(self, builder: Any, original: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not (self._is(lhs) and self._is(rhs)):
            result = self._shifted(lhs, rhs, op, original(builder, lhs, rhs, op))
            if op in (np.add, np.subtract) and (known := lhs.attr.get("rounded") or rhs.attr.get("rounded")):
                result.attr["rounded"] = known
            return result
        output = op(widen(lhs.data), widen(rhs.data))
        if output.dtype == np.bool_:
            return self.interpreter.TensorHandle(output, self.interpreter.tl.int1)
        result = self._handle(narrow(output))
        if op is np.add or op is np.subtract:
            self._watch_sum(lhs, rhs, result)
        return result

    def _watch_rounding(self, src: Any, result: Any) -> None:
        """The same in other words: widened, added to in fp32, and rounded back, time after time at one line."""
        here = self.instruction()
        before, times = src.attr.get("rounded", (None, 0))
        times = times + 1 if before == here else 1
        result.attr["rounded"] = (here, times)
        if times > LONG_SUM:
            detail = "a sum is rounded to bf16, which has 8 bits, each time around a loop: keep it in float32"
            self.note("bf16-accumulation", here[0], detail)

    def _watch_sum(self, lhs: Any, rhs: Any, result: Any) -> None:
        """A sum that is carried around a loop in bf16 stops growing once it is 256 times what is added."""
        here = self.instruction()
        for old, term in ((lhs, rhs), (rhs, lhs)):
            before, times = old.attr.get("bf16 sum", (None, 0))
            if before == here:
                result.attr["bf16 sum"] = (here, times + 1)
                swamped = (result.data == old.data) & (widen(term.data) != 0)
                if times + 1 >= LONG_SUM or swamped.any():
                    lost = f"; here {int(swamped.sum())} terms vanish in one addition" if swamped.any() else ""
                    detail = f"a sum is carried around a loop in bf16, which has 8 bits{lost}: accumulate in float32"
                    self.note("bf16-accumulation", here[0], detail)
                return
        result.attr["bf16 sum"] = (here, 1)

    def _shifted(self, lhs: Any, rhs: Any, op: Any, result: Any) -> Any:
        """fp32 bits shifted right by 16 are bf16 that was cut off; adding a bias first is rounding by hand."""
        if lhs.attr.get("fp32 bits") and op is np.right_shift and (np.asarray(rhs.data) == 16).all():
            result.attr["cut fp32 bits"] = True
        return result

    def ternary_op(self, builder: Any, original: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or not self._is(other):
            return NotImplemented
        return self._handle(narrow(op(widen(lhs.data), widen(rhs.data), widen(other.data))))

    def create_clampf(self, builder: Any, original: Any, arg: Any, lo: Any, hi: Any, nans: Any) -> Any:
        if not self._is(arg):
            return NotImplemented
        x, low, high = widen(arg.data), widen(lo.data), widen(hi.data)
        keeps_nans = nans != self.interpreter._ir.PROPAGATE_NAN.NONE
        return self._handle(narrow(np.clip(x, low, high) if keeps_nans else np.fmin(np.fmax(x, low), high)))

    def unary_op(self, builder: Any, original: Any, arg: Any, op: Any) -> Any:
        return self._handle(narrow(op(widen(arg.data)))) if self._is(arg) else NotImplemented

    def create_fma(self, builder: Any, original: Any, x: Any, y: Any, z: Any) -> Any:
        if not self._is(z):
            return NotImplemented
        exact = widen(x.data).astype(np.float64) * widen(y.data) + widen(z.data)
        return self._handle(narrow(exact.astype(np.float32)))

    def cast_impl(self, builder: Any, original: Any, src: Any, dst_type: Any) -> Any:
        wanted = dst_type.scalar
        if self._is(src):
            values = widen(src.data)
            if wanted.name == "bf16":
                return src
            kind = self.interpreter._get_np_dtype(wanted)
            if kind == np.bool_:
                return self.interpreter.TensorHandle(values != 0, wanted)
            wide = self.interpreter.TensorHandle(values.astype(kind), wanted)
            if "rounded" in src.attr:
                wide.attr["rounded"] = src.attr["rounded"]
            return wide
        if wanted.name == "bf16":
            result = self._handle(narrow(src.data.astype(np.float32)))
            self._watch_rounding(src, result)
            return result
        done = original(builder, src, dst_type)
        if src.attr.get("cut fp32 bits"):
            done.attr["cut fp32 bits"] = True
        return done

    def create_fp_to_fp(self, builder: Any, original: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        from_, to = src.dtype.scalar, dst_type.scalar
        if to.name == "bf16" and from_.name in ("fp16", "fp32", "fp64"):
            towards_zero = rounding_mode == self.interpreter._ir.ROUNDING_MODE.RTZ
            result = self._handle(narrow(src.data.astype(np.float32), truncate=towards_zero))
            self._watch_rounding(src, result)
            return result
        if self._is(src) and to.name in ("fp16", "fp32", "fp64"):
            return self.cast_impl(builder, original, src, dst_type)
        if to.name in fp8.FORMATS and (self._is(src) or from_.name in ("fp16", "fp32", "fp64")):
            values = widen(src.data) if self._is(src) else src.data
            return self.interpreter.TensorHandle(fp8.narrow(values, fp8.FORMATS[to.name]), to)
        if self._is(src):  # to another fp8: Triton's own rounding, from the true values
            wide = self.interpreter.TensorHandle(widen(src.data), self.interpreter.tl.float32)
            return original(builder, wide, dst_type, rounding_mode)
        return NotImplemented

    def create_bitcast(self, builder: Any, original: Any, src: Any, dst_type: Any) -> Any:
        done = original(builder, src, dst_type)
        if src.dtype.scalar.name == "fp32" and dst_type.scalar.is_int():
            done.attr["fp32 bits"] = True
        if dst_type.scalar.name == "bf16" and src.attr.get("cut fp32 bits"):
            detail = "the upper half of fp32 bits is taken as bf16, which cuts off where .to(tl.bfloat16) rounds"
            self.note("bf16-truncation", self.instruction()[0], detail)
        return done

    def create_dot(self, builder: Any, original: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        left, right = (widen(side.data) if self._is(side) else side.data for side in (a, b))
        is_16_bit = all(self._is(side) or side.dtype.scalar.name == "fp16" for side in (a, b))
        if is_16_bit and d.dtype.scalar.name == "fp32":
            return self.interpreter.TensorHandle(by_tensor_cores(left, right, d.data), d.dtype.scalar)
        if not (self._is(a) or self._is(b) or self._is(d)):
            return NotImplemented
        product = np.matmul(left.astype(np.float32), right.astype(np.float32), dtype=np.float32)
        if self._is(d):
            return self._handle(narrow(product + widen(d.data)))
        return self.interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    def create_atomic_rmw(
        self, builder: Any, original: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        if not self._is(val):
            return NotImplemented
        return self._handle(add_at(self.interpreter._interpreter, ptr.data, val.data, np.asarray(mask.data)))


def add_at(memory: Any, addresses: Array, bits: Array, mask: Array) -> Array:
    """bf16 atomic adds, lane after lane where lanes share an address; gives what was there before."""
    where, lanes = addresses.reshape(-1), np.flatnonzero(np.broadcast_to(mask, addresses.shape).reshape(-1))
    terms = np.broadcast_to(bits, addresses.shape).reshape(-1)
    before = np.zeros(where.shape, np.uint16)
    while lanes.size:
        _, first = np.unique(where[lanes], return_index=True)
        now = lanes[first]
        at, yes = np.ascontiguousarray(where[now]), np.ones(len(now), bool)
        old = memory.load(at, yes, np.zeros(len(now), np.uint16), np.dtype(np.uint16))
        memory.store(at, narrow(widen(old) + widen(terms[now])), yes)
        before[now] = old
        lanes = np.setdiff1d(lanes, now, assume_unique=True)
    return before.reshape(addresses.shape)
