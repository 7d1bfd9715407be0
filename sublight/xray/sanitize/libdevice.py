"""NVIDIA's libdevice by numpy, for kernels that call it: Triton's interpreter has none of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "fabs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "ceil": np.ceil,
    "cos": np.cos,
    "cosh": np.cosh,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "fmod": np.fmod,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "nearbyint": np.rint,
    "pow": np.power,
    "rint": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
}


def install(interpreter: Any) -> None:
    """Over the empty functions of triton.language.extra.libdevice, and the calls that name a symbol."""
    from triton.language.extra import libdevice

    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    original = builder.create_extern_elementwise

    def create_extern_elementwise(
        self: Any, library: str, path: str, symbol: str, args: list[Any], kind: Any, is_pure: bool
    ) -> Any:
        name = symbol.removeprefix("__nv_")
        function = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f"))
        if function is None:
            return original(self, library, path, symbol, args, kind, is_pure)
        return interpreter.TensorHandle(_applied(function, [arg.data for arg in args]), args[0].dtype.scalar)

    builder.create_extern_elementwise = create_extern_elementwise
    for name, function in _FUNCTIONS.items():
        if hasattr(libdevice, name):
            call: Any = _of_tensors(interpreter, tl, function)
            call.stands_for = libdevice.__name__, name  # for the process that compiles
            setattr(libdevice, name, call)


def _of_tensors(interpreter: Any, tl: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        values = [arg.handle.data if isinstance(arg, tl.tensor) else getattr(arg, "value", arg) for arg in args]
        first = next(arg for arg in args if isinstance(arg, tl.tensor))
        handle = interpreter.TensorHandle(_applied(function, values), first.dtype)
        return tl.tensor(handle, first.type)

    return call


def _applied(function: Callable[..., Any], values: list[Any]) -> Any:
    """The function's result in the type of the first array."""
    kind = next(value.dtype for value in values if isinstance(value, np.ndarray))
    with np.errstate(all="ignore"):
        return np.asarray(function(*values)).astype(kind)
