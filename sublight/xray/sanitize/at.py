"""The sizes of `--at`: the same launch with a larger argument, a grid that grew with it, and only its last programs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sublight.xray.record import Place

ALL_ITERATIONS = 64  # a longer loop runs its first two and its last two times


class Enough(Exception):
    """A launch at pretended sizes has run long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretended:
    names: frozenset[str]  # of --at, that this launch has
    arguments: dict[str, Any]
    grid: tuple[int, int, int]

    def programs(self) -> Iterator[tuple[int, int, int]]:
        """The last two along each axis."""
        x, y, z = (range(max(0, size - 2), size) for size in self.grid)
        return itertools.product(x, y, z)


def pretend(
    bound: Mapping[str, Any], constants: list[str], grid: tuple[int, int, int], at: Mapping[str, int]
) -> Pretended | None:
    """Put the sizes in. None where this launch has none of the names.

    A name is a number's among the arguments, or says a tensor's size: `x_ptr.numel`, `x_ptr.shape[0]`, `numel`. Strides
    of the same value grow with it, and so does an axis of the grid that is the size over a block.

    >>> plan = pretend({"n": 1000, "stride": 1000, "BLOCK": 128}, ["BLOCK"], (8, 4, 1), {"n": 3_000_000_000})
    >>> plan.arguments, plan.grid
    ({'n': 3000000000, 'stride': 3000000000, 'BLOCK': 128}, (23437500, 4, 1))
    """
    arguments, sizes, rest, names = dict(bound), list(grid), list(grid), set()
    blocks = _blocks([bound[name] for name in constants if name not in at])
    for name, new in at.items():
        old = _old(bound, constants, name)
        if old is None:
            continue
        names.add(name)
        for argument, value in bound.items():
            follows = argument == name or name not in bound or _is_stride(argument)
            may = argument not in constants or argument == name
            if follows and may and type(value) is int and value == old:
                arguments[argument] = new
        others = [
            value for argument, value in bound.items() if _is_size(argument, value, constants) and argument != name
        ]
        _grow(sizes, rest, blocks, old, new, others)
    if not names:
        return None
    x, y, z = (min(size, 2**31 - 1) for size in sizes)
    return Pretended(names=frozenset(names), arguments=arguments, grid=(x, y, z))


def _is_size(argument: str, value: Any, constants: list[str]) -> bool:
    return type(value) is int and value > 1 and argument not in constants and not _is_stride(argument)


def _is_stride(argument: str) -> bool:
    """By its name: stride_am, sam, s_b, lda.

    >>> [name for name in ("stride_am", "sam", "s_b", "lda", "size", "seq", "n", "M", "state") if _is_stride(name)]
    ['stride_am', 'sam', 's_b', 'lda']
    """
    short = re.fullmatch(r"s_?[a-z0-9]{1,3}|s[a-z]_?[a-z0-9]{1,2}|ld_?[a-z0-9]{1,2}", argument)
    return "stride" in argument or (short is not None and argument not in ("size", "seq", "seed", "step", "sms"))


def _old(bound: Mapping[str, Any], constants: list[str], name: str) -> int | None:
    """What the size is in the launch that was made."""
    value = bound.get(name)
    if type(value) is int:
        return value
    numbers = {value for key, value in bound.items() if type(value) is int and key not in constants}
    for key, tensor in bound.items():
        if not hasattr(tensor, "data_ptr") or not hasattr(tensor, "numel"):
            continue
        named = {f"{key}.numel": tensor.numel(), f"{key}.numel()": tensor.numel(), "numel": tensor.numel()}
        for i, size in enumerate(tensor.shape):
            named |= {f"{key}.shape[{i}]": size, f"{key}.size({i})": size}
        if named.get(name) in numbers:
            return int(named[name])
    return None


def _blocks(constants: list[Any]) -> list[int]:
    """What a size may be divided by to give a grid: a constant, or a product of two; the largest first, then 1."""
    numbers = [n for n in constants if type(n) is int and n > 1]
    products = [a * b for a, b in itertools.combinations(numbers, 2)]
    return [*sorted({*numbers, *products}, reverse=True), 1]


def _grow(sizes: list[int], rest: list[int], blocks: list[int], old: int, new: int, others: Sequence[int] = ()) -> None:
    """Let the axis grow that counts the size's blocks, alone or as a factor, or the blocks of its product with one of
    the other sizes. `rest`: what no size has explained yet.

    >>> sizes, rest = [12, 1, 1], [12, 1, 1]  # of a matrix product: 3 blocks of 16 rows, 4 of 16 columns
    >>> _grow(sizes, rest, [16, 1], 40, 1600); _grow(sizes, rest, [16, 1], 60, 160); sizes, rest
    ([1000, 1, 1], [1, 1, 1])
    >>> sizes, rest = [489, 1, 1], [489, 1, 1]  # 10 rows of 50,000, in blocks of 1,024 of all
    >>> _grow(sizes, rest, [1024, 1], 10, 100_000, [50_000]); sizes
    [4882813, 1, 1]
    """
    counts = [(block, -(-old // block)) for block in blocks if old > block]
    alone = [(axis, *pair) for axis in range(3) for pair in counts if rest[axis] == pair[1]]
    factor = [(axis, *pair) for axis in range(3) for pair in counts if rest[axis] > 1 and rest[axis] % pair[1] == 0]
    for axis, block, count in (alone or factor)[:1]:
        sizes[axis] = sizes[axis] // count * -(-new // block)
        rest[axis] //= count
        return
    for axis, other, block in itertools.product(range(3), others, blocks):
        if rest[axis] > 1 and rest[axis] == -(-old * other // block):
            sizes[axis] = -(-new * other // block)
            rest[axis] = 1
            return
    # one block held it all, so its axis is 1 and cannot be told from the others: the first is the likeliest
    fitting = [block for block in blocks if block > 1 and old <= block]
    if sizes[0] == 1 and fitting and new > fitting[-1]:
        sizes[0] = -(-new // fitting[-1])


def ends_of(interpreter: Any, note: Callable[[str, Place, str], None]) -> Callable[..., Iterator[Any]]:
    """`range` for such a launch: the ends of a long loop, and counters in the type that the compiler gives them."""

    def ends(*args: Any, **kwargs: Any) -> Iterator[Any]:
        bounds = [*args, *((kwargs["step"],) if "step" in kwargs else ())]
        if len(args) == 1 and "step" in kwargs:
            bounds = [0, *bounds]
        for bound in bounds:
            if known := getattr(getattr(bound, "handle", None), "attr", {}).get("wrapped"):
                note(
                    "offset-overflow", known.place, f"{known.words()}, and a loop ends by it: make it int64 before this"
                )
        values = [int(getattr(bound, "value", bound)) for bound in bounds]
        counters = range(*values)
        if not any(isinstance(bound, interpreter.tl.tensor) for bound in bounds):
            yield from counters  # of constants: the compiler may unroll it
            return
        tl = interpreter.tl
        is_wide = any(bound.dtype.primitive_bitwidth == 64 for bound in bounds if isinstance(bound, tl.tensor)) or any(
            not -(2**31) <= value < 2**31 for value in values
        )
        kind, element = (tl.int64, np.int64) if is_wide else (tl.int32, np.int32)
        many = len(counters) > ALL_ITERATIONS
        for counter in (counters[0], counters[1], counters[-2], counters[-1]) if many else counters:
            yield tl.tensor(interpreter.TensorHandle(np.array([counter], element), kind), kind)

    return ends
