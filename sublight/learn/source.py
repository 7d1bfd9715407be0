"""The source of a function in a notebook, with everything that it uses: kernels, helpers, constants, imports."""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from sublight.errors import BadInput

_IMPORTS = ("import torch", "import triton", "import triton.language as tl")
_PLAIN = (bool, int, float, str, tuple, list, type(None))


def source_of(function: Any) -> str:
    """One file that stands for itself: what `function` needs comes before it."""
    if not isinstance(function, types.FunctionType):
        raise BadInput("sublight.learn.check takes the function that launches the kernel, such as add(x, y, out)")
    parts: dict[str, str] = {}
    _gather(function, parts)
    return "\n".join([*dict.fromkeys((*_IMPORTS, *_lines(parts, "import "))), "", *_lines(parts, "")]) + "\n"


def _lines(parts: dict[str, str], kind: str) -> Iterator[str]:
    """Imports, or all else."""
    for text in parts.values():
        if text.startswith(("import ", "from ")) == bool(kind):
            yield text


def _gather(function: types.FunctionType, parts: dict[str, str]) -> None:
    """What a function uses, then the function."""
    name = function.__name__
    if name in parts:
        return
    parts[name] = ""  # it may call itself
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise BadInput(f"the source of {name} is not at hand: write it in a cell or in a file") from None
    for used in _names(function.__code__):
        if used in function.__globals__ and used not in parts:
            _add(used, function.__globals__[used], parts)
    del parts[name]
    parts[name] = text


def _add(name: str, value: Any, parts: dict[str, str]) -> None:
    if isinstance(value, types.ModuleType):
        parts[name] = f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
        return
    kind = type(value).__name__
    while hasattr(value, "fn"):  # a kernel, with its tuning and heuristics around it
        value = value.fn
    if isinstance(value, types.FunctionType) and value.__module__.split(".")[0] not in ("torch", "triton"):
        _gather(value, parts)
    elif isinstance(value, types.FunctionType):
        parts[name] = f"from {value.__module__} import {value.__name__} as {name}"
    elif kind == "constexpr":
        parts[name] = f"{name} = tl.constexpr({value.value!r})"
    elif isinstance(value, _PLAIN) or kind == "dtype":
        parts[name] = f"{name} = {value!r}"
    else:
        raise BadInput(f"{name} is a {kind}, which cannot be sent to the grader: make it a number, or an argument")


def _names(code: types.CodeType) -> Iterator[str]:
    """Every global name, those of inner functions and lambdas, too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
