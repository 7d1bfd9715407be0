"""A launch in words that do not depend on how it is carried out: what is compiled must be what was run.

A submission could tell the process that compiles it from the one that runs it, by its memory's addresses, by counting
its calls, by how a kernel prints, and launch something cheaper where nobody looks at the numbers.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN = (bool, int, float, str, type(None))


def words_of(jit: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], tensors: Sequence[Any] = ()) -> str:
    """The kernel and where it stands, its grid, its numbers, and what it uses of the module: constants, and functions
    with theirs; a number that is an address in one of `tensors` is named by its place there."""
    function = jit.fn
    given = {name: _plain(arguments[name], tensors) for name in jit.arg_names if name in arguments}
    used = _used(function, {function})
    for value in arguments.values():
        if _is_function(value):
            used |= {value.fn.__name__: _place_of(value.fn), **_used(value.fn, {function, value.fn})}
    place = _place_of(function)
    return f"{place}, grid {(*grid, 1, 1, 1)[:3]}, {given}{f', {used}' if used else ''}"


def _place_of(function: Any) -> str:
    return f"{function.__name__} of line {function.__code__.co_firstlineno}"


def _is_function(value: Any) -> bool:
    """Whether this is a kernel, or a function that a kernel may call: Triton's wrapper of one."""
    return hasattr(getattr(value, "fn", None), "__code__")


def _used(function: Any, seen: set[Any]) -> dict[str, Any]:
    """By name, what a kernel finds around it: the values of constants, the places of functions, and what these use."""
    code = function.__code__
    around = {name: function.__globals__.get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is bound to it yet
            around[name] = cell.cell_contents
    used: dict[str, Any] = {}
    for name, value in around.items():
        if type(value).__name__ == "constexpr":
            used[name] = value.value
        elif _is_function(value) and value.fn not in seen and not value.fn.__module__.startswith("triton."):
            seen.add(value.fn)
            used |= {name: _place_of(value.fn), **{f"{name}: {one}": x for one, x in _used(value.fn, seen).items()}}
    return used


def _plain(value: Any, tensors: Sequence[Any]) -> Any:
    """Numbers as they are; of everything else its kind, which both ways of running have in common."""
    if isinstance(value, PLAIN):
        return _place(value, tensors) or value
    if isinstance(value, tuple | list):
        return [_plain(each, tensors) for each in value]
    if type(value).__name__ == "constexpr":
        return _plain(value.value, tensors)
    if hasattr(value, "untyped_storage"):
        return f"{value.dtype} {tuple(value.shape)}"
    return getattr(value, "__name__", None) or type(value).__name__


def is_place(value: Any, tensors: Sequence[Any]) -> bool:
    """Whether a number is an address in one of the tensors, or a list has one."""
    if isinstance(value, tuple | list):
        return any(is_place(each, tensors) for each in value)
    return not isinstance(value, bool) and bool(_place(value, tensors))


def _place(value: Any, tensors: Sequence[Any]) -> str:
    """Where an address lies; empty for a number that is none."""
    for number, tensor in enumerate(tensors):
        start = tensor.untyped_storage().data_ptr()
        if isinstance(value, int) and start <= value < start + tensor.untyped_storage().nbytes():
            return f"tensor {number} + {value - tensor.data_ptr()}"
    return ""


def programs_of(words: str) -> str:
    """How many programs a launch had, of its words; empty for words of another kind.

    >>> programs_of("copy_kernel of line 9, grid (2, 1, 1), {'n': 9}")
    'grid (2,): 2 programs of copy_kernel ran'
    >>> programs_of("add_2d_kernel of line 9, grid (1, 7, 1), {}")
    'grid (1, 7): 7 programs of add_2d_kernel ran'
    """
    found = re.match(r"(\w+) of line \d+, grid \((\d+), (\d+), (\d+)\)", words)
    if not found:
        return ""
    name, *grid = found.groups()
    while len(grid) > 1 and grid[-1] == "1":
        grid.pop()
    count, sizes = math.prod(map(int, grid)), f"{grid[0]}," if len(grid) == 1 else ", ".join(grid)
    return f"grid ({sizes}): {count:,} program{'s' * (count != 1)} of {name} ran"


def difference(compiled: list[str], ran: list[str]) -> str:
    """What a check says where the two are not the same; empty where they are."""
    if compiled == ran:
        return ""
    pairs = zip([*compiled, "nothing"], [*ran, "nothing"], strict=False)
    one, other = next((a, b) for a, b in pairs if a != b)
    short = [words.split(", {")[0] for words in (one, other)]  # without arguments, where these are the same
    one, other = short if short[0] != short[1] else (one, other)
    return f"it launches other kernels when it is compiled than when it runs: {one}, not {other}"
