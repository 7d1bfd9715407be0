"""Rounding to fp8 as a GPU does it: to nearest even, subnormals kept, what is too large held at the largest.

Triton's interpreter flushes subnormals to zero, and a mantissa that rounds up past its bits loses its exponent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sublight.xray.sanitize.memory import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    mantissa: int  # bits
    bias: int
    largest: float
    nan: int  # bits


FORMATS = {
    "fp8e4nv": Format(mantissa=3, bias=7, largest=448.0, nan=0x7F),
    "fp8e5": Format(mantissa=2, bias=15, largest=57344.0, nan=0x7F),
}


def narrow(values: Array, kind: Format) -> Array:
    """
    >>> x = np.array([1.0, -448.0, 0.1, 1.97, 1e-3, 0.0, 1e9, np.nan])
    >>> [hex(bits) for bits in narrow(x, FORMATS["fp8e4nv"])]
    ['0x38', '0xfe', '0x1d', '0x40', '0x1', '0x0', '0x7e', '0x7f']
    """
    wide = np.asarray(values, np.float64)
    size = np.minimum(np.where(np.isnan(wide), 0.0, np.abs(wide)), kind.largest)
    _, power = np.frexp(size)
    quantum = np.ldexp(1.0, np.maximum(power - 1, 1 - kind.bias) - kind.mantissa)
    size = np.rint(size / quantum) * quantum
    fraction, power = np.frexp(size)
    exponent = np.maximum(power - 1 + kind.bias, 0)
    normal = (exponent << kind.mantissa) + np.rint((2 * fraction - 1) * 2**kind.mantissa).astype(np.int64)
    tiny = np.rint(np.ldexp(size, kind.bias - 1 + kind.mantissa)).astype(np.int64)
    bits = np.where((size == 0) | (power - 1 + kind.bias < 1), tiny, normal) | (np.signbit(wide).astype(np.int64) << 7)
    return np.where(np.isnan(wide), kind.nan, bits).astype(np.uint8)
