"""cvt: from one PTX type to another, and the record of what an instruction does to numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sublight.xray.ptx.numbers import BITS, SIGNED, Array, Kind

Function = Callable[..., Array]
_ROUNDING: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """An opcode's function and the types it reads and writes."""

    function: Function
    reads: tuple[str, ...]
    writes: str


def clamped(x: Array) -> Array:
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, x.dtype.type(0), x.dtype.type(1)))


def conversion(modifiers: tuple[str, ...]) -> Meaning | None:
    """cvt: with its rounding, saturation and packing of two."""
    if len(modifiers) < 2 or "pack" in modifiers:
        return None
    to, source = Kind(modifiers[-2]), Kind(modifiers[-1])
    rounding = next((_ROUNDING[word] for word in modifiers if word in _ROUNDING), None)
    down = {"rz": "zero", "rm": "floor", "rp": "ceil"}
    if to.is_float and to.item_bytes < 8 and any(word in down for word in modifiers):
        return None  # numpy only rounds to nearest
    if to.pair and not source.pair:  # the first operand is the upper half
        return Meaning(
            function=lambda high, low: np.stack(np.broadcast_arrays(low, high), axis=1),
            reads=(source.name, source.name),
            writes=to.name,
        )
    function = functools.partial(_converted, to=to, source=source, rounding=rounding, modifiers=modifiers)
    return Meaning(function=function, reads=(source.name,), writes=to.name)


def _converted(a: Array, *, to: Kind, source: Kind, rounding: Function | None, modifiers: tuple[str, ...]) -> Array:
    if to.is_float:
        wide = np.float64 if to.item_bytes == 8 or source.item_bytes == 8 or not source.is_float else np.float32
        out = a.astype(wide)
        if rounding:
            out = rounding(out)
        if "sat" in modifiers:
            out = clamped(out)
        return np.maximum(out, wide(0)) if "relu" in modifiers else out
    signed = to.family == "s"
    limits = np.iinfo((SIGNED if signed else BITS)[to.item_bytes])
    if source.is_float:
        has_long = source.item_bytes == 8 or to.item_bytes == 8
        nan = float(-(2 ** (8 * to.item_bytes - 1))) if has_long else 0.0  # the highest bit alone, or nothing
        numbers = np.nan_to_num((rounding or np.trunc)(a.astype(np.float64)), nan=nan if signed else -nan)
        bounded = np.clip(numbers, float(limits.min), float(limits.max))
        top = numbers >= float(limits.max)  # 2**63 - 1 is no float64
        safe = np.where(top, 0.0, bounded)
        return np.where(top, limits.dtype.type(limits.max), safe.astype(limits.dtype))
    if "sat" in modifiers:
        low, high = max(limits.min, np.iinfo(a.dtype).min), min(limits.max, np.iinfo(a.dtype).max)
        a = np.clip(a, a.dtype.type(low), a.dtype.type(high))
    return a.astype(limits.dtype)
