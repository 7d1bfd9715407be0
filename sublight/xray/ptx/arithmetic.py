"""What PTX's arithmetic does, as numpy functions over the lanes: numbers in, numbers out.

`meaning(parts)` gives the function of an opcode with the types of its operands and of its result, or None where it is
not emulated: the result is then unknown, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sublight.xray.ptx.conversion import Function, Meaning, clamped, conversion
from sublight.xray.ptx.numbers import BITS, SIGNED, Array, Kind

COMPARISONS: dict[str, Function] = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}
BOOLEANS: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def meaning(parts: tuple[str, ...]) -> Meaning | None:
    """What an instruction computes, lane by lane and without memory; None: not emulated.

    >>> int(meaning(("mul", "wide", "u32")).function(np.array([2**31], np.uint32), np.array([4], np.uint32))[0])
    8589934592
    """
    name, modifiers = parts[0], parts[1:]
    try:
        if name == "cvt":
            return conversion(modifiers)
        kind = Kind(modifiers[-1]) if modifiers else None
    except ValueError:
        return None
    if kind is None:
        return None
    mixed = _mixed(name, modifiers)
    if mixed:
        return mixed
    if name in ("mul", "mad") and "wide" in modifiers:
        wide = kind.family + str(16 * kind.bytes)
        function = _wide_multiply if name == "mul" else lambda a, b, c: _wide_multiply(a, b) + c
        return Meaning(function=function, reads=(kind.name,) * 2 + (wide,) * (name == "mad"), writes=wide)
    if {"cc", "hilo"} & set(modifiers) or name in ("addc", "subc", "madc"):
        return None
    table = _FLOAT if kind.is_float else _PREDICATE if kind.family == "pred" else _INTEGER
    made = table.get(name)
    if made is None:
        return None
    return made(kind, modifiers)


def three_way(of_two: Meaning) -> Meaning:
    """min and max of three, since sm_100."""
    function = of_two.function
    return Meaning(
        function=lambda a, b, c: function(function(a, b), c),
        reads=of_two.reads + of_two.reads[:1],
        writes=of_two.writes,
    )


# ------------------------------------------------------------------------------------------------ how tables are made


def _same(function: Function, count: int) -> Callable[[Kind, tuple[str, ...]], Meaning]:
    return lambda kind, modifiers: Meaning(function=function, reads=(kind.name,) * count, writes=kind.name)


def _typed(function: Function, *reads: str, writes: str = "") -> Callable[[Kind, tuple[str, ...]], Meaning]:
    """Some operands have a type of their own; an empty word is the instruction's."""
    return lambda kind, modifiers: Meaning(
        function=function, reads=tuple(read or kind.name for read in reads), writes=writes or kind.name
    )


def _saturating(function: Function, count: int) -> Callable[[Kind, tuple[str, ...]], Meaning]:
    """A float operation, with .sat clamped to [0, 1] and .relu to what is not negative."""

    def made(kind: Kind, modifiers: tuple[str, ...]) -> Meaning:
        chosen = function
        if "sat" in modifiers:
            chosen = lambda *numbers: clamped(function(*numbers))  # noqa: E731
        elif "relu" in modifiers:
            chosen = lambda *numbers: np.maximum(function(*numbers), np.float32(0))  # noqa: E731
        return Meaning(function=chosen, reads=(kind.name,) * count, writes=kind.name)

    return made


def _mixed(name: str, modifiers: tuple[str, ...]) -> Meaning | None:
    """`add.rn.f32.bf16 d, a, c`: a narrow operand widened on the way (fma: two of them)."""
    if len(modifiers) < 2 or name not in ("add", "sub", "fma") or modifiers[-2] != "f32":
        return None
    narrow = modifiers[-1]
    if name == "fma":
        return Meaning(function=_fused, reads=(narrow, narrow, "f32"), writes="f32")
    function = np.add if name == "add" else np.subtract
    return Meaning(function=function, reads=(narrow, "f32"), writes="f32")


# ------------------------------------------------------------------------------------------------ integers


def _summed(function: Function) -> Callable[[Kind, tuple[str, ...]], Meaning]:
    """Sums and differences wrap round, or stay at the type's ends with .sat."""

    def made(kind: Kind, modifiers: tuple[str, ...]) -> Meaning:
        ends = np.iinfo(np.int32)

        def bounded(a: Array, b: Array) -> Array:
            wide = function(a.astype(np.int64), b.astype(np.int64))
            return np.clip(wide, ends.min, ends.max).astype(np.int32)

        return _same(bounded if "sat" in modifiers else function, 2)(kind, modifiers)

    return made


def _rectified(function: Function) -> Callable[[Kind, tuple[str, ...]], Meaning]:
    """min and max of integers, with .relu never negative."""

    def made(kind: Kind, modifiers: tuple[str, ...]) -> Meaning:
        chosen = (lambda a, b: np.maximum(function(a, b), a.dtype.type(0))) if "relu" in modifiers else function
        return _same(chosen, 2)(kind, modifiers)

    return made


def _wide_multiply(a: Array, b: Array) -> Array:
    table = SIGNED if a.dtype.kind == "i" else BITS
    wide = table[2 * a.dtype.itemsize]
    out: Array = np.multiply(a.astype(wide), b.astype(wide))
    return out


def _high(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = _wide_multiply(a, b)
        high: Array = (wide >> wide.dtype.type(bits)).astype(a.dtype)
        return high
    left, right = np.broadcast_arrays(a, b)
    products = [(int(x) * int(y)) >> 64 for x, y in zip(left, right, strict=True)]
    return np.array([product & (2**64 - 1) for product in products], np.uint64).view(a.dtype)


def _multiply(kind: Kind, modifiers: tuple[str, ...]) -> Meaning:
    return Meaning(function=_high if "hi" in modifiers else np.multiply, reads=(kind.name,) * 2, writes=kind.name)


def _multiply_add(kind: Kind, modifiers: tuple[str, ...]) -> Meaning | None:
    if "sat" in modifiers:
        return None
    if "hi" in modifiers:
        return Meaning(function=lambda a, b, c: _high(a, b) + c, reads=(kind.name,) * 3, writes=kind.name)
    return Meaning(function=lambda a, b, c: a * b + c, reads=(kind.name,) * 3, writes=kind.name)


def _divide(a: Array, b: Array) -> Array:
    """Towards zero; all ones where the divisor is zero, as the hardware does."""
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // np.where(b == 0, a.dtype.type(1), b))
    safe = np.where(b == 0, a.dtype.type(1), b)
    quotient = a // safe
    quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    out: Array = np.where(b == 0, a.dtype.type(-1), quotient)
    return out


def _remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, a - _divide(a, b) * b)


def _shift_left(a: Array, amount: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    moved = a << np.minimum(amount, np.uint32(bits - 1)).astype(a.dtype)
    out: Array = np.where(amount >= bits, a.dtype.type(0), moved)
    return out


def _shift_right(a: Array, amount: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    moved = a >> np.minimum(amount, np.uint32(bits - 1)).astype(a.dtype)
    out: Array = moved if a.dtype.kind == "i" else np.where(amount >= bits, a.dtype.type(0), moved)
    return out


def _extract(a: Array, position: Array, length: Array) -> Array:
    """bfe: a field, with the sign of its top bit for signed types."""
    bits = 8 * a.dtype.itemsize
    position, length = position & np.uint32(0xFF), np.minimum(length & np.uint32(0xFF), np.uint32(bits))
    raw = _shift_right(a.view(BITS[a.dtype.itemsize]), position)
    if a.dtype.kind == "u":
        return raw & _ones(length, raw.dtype)
    if np.any(position + length > bits):  # the sign bit is then the number's own
        length = np.where(position + length > bits, np.where(position < bits, bits - position, 1), length)
    room = np.uint32(bits) - length
    out: Array = np.where(length == 0, a.dtype.type(0), _shift_left(raw, room).view(a.dtype) >> room.astype(a.dtype))
    return out


def _insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
    field = _shift_left(_ones(length, a.dtype), position)
    return (b & ~field) | (_shift_left(a, position) & field)


def _ones(length: Array, dtype: np.dtype[np.generic]) -> Array:
    one = np.array([1], dtype)
    return _shift_left(np.broadcast_to(one, np.shape(length)), length) - one


def _distance(a: Array, b: Array, c: Array) -> Array:
    return c + np.where(a > b, a - b, b - a)


def _population(a: Array) -> Array:
    ones: Array = _as_bits(a).sum(1, np.uint32)
    return ones


def _as_bits(a: Array) -> Array:
    """Most significant first, one row a lane."""
    width = a.dtype.itemsize
    raw = np.ascontiguousarray(a).view(np.uint8).reshape(-1, width)[:, ::-1]
    return np.unpackbits(np.ascontiguousarray(raw), axis=1)


def _leading_zeros(a: Array) -> Array:
    rows = _as_bits(a)
    count: Array = np.where(rows.any(1), rows.argmax(1), rows.shape[1]).astype(np.uint32)
    return count


def _top_bit(a: Array) -> Array:
    """bfind: the place of the highest bit that is not a sign; all ones where there is none."""
    raw = np.where(a < 0, ~a, a).view(BITS[a.dtype.itemsize]) if a.dtype.kind == "i" else a
    return (np.uint32(8 * a.dtype.itemsize - 1) - _leading_zeros(raw)).astype(np.uint32)


def _first_bit(kind: Kind, modifiers: tuple[str, ...]) -> Meaning:
    """bfind.shiftamt tells by how much that bit is to be shifted to become the highest."""

    def shift(a: Array) -> Array:
        place = _top_bit(a)
        none = np.uint32(0xFFFFFFFF)
        return np.where(place == none, none, np.uint32(8 * a.dtype.itemsize - 1) - place)

    return Meaning(function=shift if "shiftamt" in modifiers else _top_bit, reads=(kind.name,), writes="u32")


def _reversed(a: Array) -> Array:
    width = a.dtype.itemsize
    raw = np.packbits(np.ascontiguousarray(_as_bits(a)[:, ::-1]), axis=1)[:, ::-1]
    return np.ascontiguousarray(raw).view(BITS[width]).reshape(-1)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt: four bytes picked from eight; a selector's fourth bit spreads the sign."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(both.shape, np.uint32)
    for i in range(4):
        pick = (selector >> np.uint32(4 * i)) & np.uint32(0xF)
        byte = (both >> (np.uint64(8) * (pick & np.uint32(7)).astype(np.uint64))) & np.uint64(0xFF)
        spread = np.where(byte >= 128, np.uint32(0xFF), np.uint32(0))
        out |= np.where(pick & np.uint32(8), spread, byte.astype(np.uint32)) << np.uint32(8 * i)
    return out


def _three_way(a: Array, b: Array, c: Array, table: Array) -> Array:
    """lop3: any function of three bits, by its table of eight."""
    chosen = int(table.flat[0])
    out: Array = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
    for i in range(8):
        if chosen >> i & 1:
            out = out | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _funnel(kind: Kind, modifiers: tuple[str, ...]) -> Meaning:
    def shifted(low: Array, high: Array, amount: Array) -> Array:
        amount = amount & np.uint32(31) if "wrap" in modifiers else np.minimum(amount, np.uint32(32))
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        if "l" in modifiers:
            return ((both << amount.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
        return (both >> amount.astype(np.uint64)).astype(np.uint32)

    return Meaning(function=shifted, reads=("b32", "b32", "u32"), writes="b32")


def _extend(kind: Kind, modifiers: tuple[str, ...]) -> Meaning:
    def extended(a: Array, length: Array) -> Array:
        length = length & np.uint32(31) if "wrap" in modifiers else np.minimum(length, np.uint32(32))
        return _extract(a, np.zeros(1, np.uint32), length)

    return Meaning(function=extended, reads=(kind.name, "u32"), writes=kind.name)


def _mask(kind: Kind, modifiers: tuple[str, ...]) -> Meaning:
    def made(position: Array, length: Array) -> Array:
        if "wrap" in modifiers:
            position, length = position & np.uint32(31), length & np.uint32(31)
        return _shift_left(_ones(length, np.dtype(np.uint32)), position)

    return Meaning(function=made, reads=("u32", "u32"), writes="b32")


_INTEGER: dict[str, Callable[[Kind, tuple[str, ...]], Meaning | None]] = {
    **{"add": _summed(np.add), "sub": _summed(np.subtract), "mul": _multiply, "mad": _multiply_add},
    **{"div": _same(_divide, 2), "rem": _same(_remainder, 2)},
    **{"min": _rectified(np.minimum), "max": _rectified(np.maximum)},
    **{"abs": _same(np.abs, 1), "neg": _same(lambda a: (~a) + a.dtype.type(1), 1), "not": _same(np.invert, 1)},
    **{"and": _same(np.bitwise_and, 2), "or": _same(np.bitwise_or, 2), "xor": _same(np.bitwise_xor, 2)},
    **{"cnot": _same(lambda a: (a == 0).astype(a.dtype), 1), "lop3": _typed(_three_way, "", "", "", "u32")},
    **{"shl": _typed(_shift_left, "", "u32"), "shr": _typed(_shift_right, "", "u32"), "shf": _funnel},
    **{"bfe": _typed(_extract, "", "u32", "u32"), "bfi": _typed(_insert, "", "", "u32", "u32")},
    **{"popc": _typed(_population, "", writes="u32"), "clz": _typed(_leading_zeros, "", writes="u32")},
    **{"bfind": _first_bit, "brev": _same(_reversed, 1), "prmt": _same(_permute, 3)},
    **{"szext": _extend, "bmsk": _mask, "mov": _same(lambda a: a, 1), "sad": _same(_distance, 3)},
}
_PREDICATE: dict[str, Callable[[Kind, tuple[str, ...]], Meaning | None]] = {
    **{"and": _same(np.logical_and, 2), "or": _same(np.logical_or, 2), "xor": _same(np.logical_xor, 2)},
    **{"not": _same(np.logical_not, 1), "mov": _same(lambda a: a, 1)},
}

# ------------------------------------------------------------------------------------------------ floats


def _fused(a: Array, b: Array, c: Array) -> Array:
    """One rounding: the product of two fp32 is exact in float64."""
    if a.dtype == np.float64:
        return a * b + c
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _extreme(function: Function, number: Function) -> Callable[[Kind, tuple[str, ...]], Meaning]:
    """max and min take the number where one is NaN, unless .NaN is asked for."""
    return lambda kind, modifiers: _saturating(function if "NaN" in modifiers else number, 2)(kind, modifiers)


_FLOAT: dict[str, Callable[[Kind, tuple[str, ...]], Meaning | None]] = {
    **{"add": _saturating(np.add, 2), "sub": _saturating(np.subtract, 2), "mul": _saturating(np.multiply, 2)},
    **{"fma": _saturating(_fused, 3), "mad": _saturating(_fused, 3), "div": _same(np.divide, 2)},
    **{"max": _extreme(np.maximum, np.fmax), "min": _extreme(np.minimum, np.fmin), "mov": _same(lambda a: a, 1)},
    **{"abs": _same(np.abs, 1), "neg": _same(np.negative, 1), "sqrt": _same(np.sqrt, 1), "ex2": _same(np.exp2, 1)},
    **{"rcp": _same(np.reciprocal, 1), "rsqrt": _same(lambda a: 1 / np.sqrt(a), 1), "lg2": _same(np.log2, 1)},
    **{"sin": _same(np.sin, 1), "cos": _same(np.cos, 1), "tanh": _same(np.tanh, 1)},
    "copysign": _same(lambda a, b: np.copysign(b, a), 2),
}


def compared(name: str, a: Array, b: Array) -> Array:
    """setp's comparison; one that ends in u is true of NaN."""
    if name in ("num", "nan"):
        nan = np.isnan(a) | np.isnan(b)
        return nan if name == "nan" else ~nan
    if name in COMPARISONS:
        out = COMPARISONS[name](a, b)
        if name == "ne" and a.dtype.kind == "f":
            out = out & ~(np.isnan(a) | np.isnan(b))
        return out
    return COMPARISONS[name[:-1]](a, b) | np.isnan(a) | np.isnan(b)
