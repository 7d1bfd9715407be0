"""Reductions and scans by a function of the kernel's own, and tl.sum, for Triton's interpreter.

The interpreter goes from element to element: hundreds of calls for one row, and a sum whose rounding grows with the
row's length; so does numpy's sum, which it takes for tl.sum, down the columns of a tile. A GPU combines pairs, then
pairs of pairs, and so does this, whole blocks at a time; order is kept. A function that branches on its values needs
one element at a time, and gets that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sublight.xray.sanitize.memory import Array

WIDE = (np.float32, np.float64)  # of 16 bits and of whole numbers numpy's sum rounds as little as can be
Parts = Sequence[Array]  # one array for each value that an element has
Combine = Callable[[Parts, Parts], Parts]


class _BranchesError(Exception):
    """The function asks for the truth of a block."""


def reduced(parts: Parts, combine: Combine) -> Parts:
    """Along the first axis. A block's length is a power of two; of one without its padding it may be any.

    >>> reduced([np.array(list("abcde"), object)], lambda a, b: [a[0] + b[0]])
    ['abcde']
    """
    length = len(parts[0])
    whole = 1 << (length.bit_length() - 1)
    if whole < length:  # Triton makes no block of another length than 2, 4, 8, …
        front, rest = (reduced([part[cut] for part in parts], combine) for cut in (slice(whole), slice(whole, None)))
        both = (
            [np.asarray(x, part.dtype)[None] for x, part in zip(side, parts, strict=True)] for side in (front, rest)
        )
        parts = combine(*both)
    while len(parts[0]) > 1:
        parts = combine([part[0::2] for part in parts], [part[1::2] for part in parts])
    return [part[0] for part in parts]


def scanned(parts: Parts, combine: Combine) -> Parts:
    """Along the first axis.

    >>> [part.tolist() for part in scanned([np.array(list("abcd"), object)], lambda a, b: [a[0] + b[0]])]
    [['a', 'ab', 'abc', 'abcd']]
    """
    step = 1
    while step < len(parts[0]):
        before = [np.concatenate([part[:step], part[:-step]]) for part in parts]  # blocks keep their length
        later = combine(before, parts)
        parts = [np.concatenate([part[:step], more[step:]]) for part, more in zip(parts, later, strict=True)]
        step *= 2
    return parts


def install(interpreter: Any) -> None:
    """Put all three over those of the interpreter."""
    tensor = interpreter.tl.core.tensor
    reduce_one_by_one, scan_one_by_one = interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan
    sum_of_numpy = interpreter.ReduceOps.sum

    def combined(ops: Any, input: Any) -> Combine:
        kinds = [each.dtype for each in input]

        def combine(left: Parts, right: Parts) -> Parts:
            values = [
                ops.to_tensor(part, kind) for side in (left, right) for part, kind in zip(side, kinds, strict=True)
            ]
            combined_values = ops.combine_fn.fn(*values)
            combined_values = combined_values if isinstance(combined_values, tuple) else (combined_values,)
            return [
                np.broadcast_to(each.to(kind).handle.data if isinstance(each, tensor) else each, part.shape).astype(
                    part.dtype, copy=False
                )
                for each, kind, part in zip(combined_values, kinds, left, strict=True)
            ]

        return combine

    def whole(fold: Callable[[Parts, Combine], Parts], ops: Any, input: Any, axis: int) -> list[Array] | None:
        """None: the function branches."""

        def refuse(block: Any) -> bool:
            raise _BranchesError

        truth = tensor.__bool__
        tensor.__bool__ = refuse
        try:
            with np.errstate(all="ignore"):
                return list(fold([np.moveaxis(each.handle.data, axis, 0) for each in input], combined(ops, input)))
        except _BranchesError:
            return None
        finally:
            tensor.__bool__ = truth

    def generic_reduce(ops: Any, input: Any) -> Any:
        flat, axis = ops.unravel(input, ops.axis)
        if (results := whole(reduced, ops, flat, axis)) is None:
            return reduce_one_by_one(ops, input)
        results = [kept(ops, result, input[0]) for result in results]
        return [ops.to_tensor(result, each.dtype) for result, each in zip(results, input, strict=True)]

    def kept(ops: Any, result: Array, input: Any) -> Array:
        """With the dimension that was reduced, where the kernel keeps it."""
        if not ops.keep_dims:
            return result
        shape = input.handle.data.shape
        axes = range(len(shape)) if ops.axis is None else (ops.axis % len(shape),)
        return np.reshape(result, [1 if at in axes else size for at, size in enumerate(shape)])

    def generic_sum(ops: Any, input: Any) -> Any:
        data = input.handle.data
        if data.dtype not in WIDE or not data.size:
            return sum_of_numpy(ops, input)
        lines = data.reshape(-1) if ops.axis is None else np.moveaxis(data, ops.axis, 0)
        with np.errstate(all="ignore"):
            [total] = reduced([lines], lambda left, right: [left[0] + right[0]])
        return ops.to_tensor(kept(ops, total, input), input.dtype)

    def generic_scan(ops: Any, input: Any) -> Any:
        if (results := whole(scanned, ops, input, ops.axis)) is None:
            return scan_one_by_one(ops, input)
        return [
            ops.to_tensor(np.moveaxis(result, 0, ops.axis), each.dtype)
            for result, each in zip(results, input, strict=True)
        ]

    interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan = generic_reduce, generic_scan
    interpreter.ReduceOps.sum = generic_sum
