"""Promises to the compiler (tl.multiple_of, tl.max_contiguous, tl.max_constancy), held against the numbers.

The compiler believes them: with a false one it loads from other addresses than the code says, faster perhaps. Triton's
interpreter takes no notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sublight.backend import private

_NAMES = {"tt.divisibility": "multiple_of", "tt.contiguity": "max_contiguous", "tt.constancy": "max_constancy"}


def install(note: Callable[[str, bool], None]) -> None:
    """In this process for good: `note` gets what is wrong with a promise, and whether it is one about a number."""
    handle = private.interpreter.TensorHandle
    plain = handle.set_attr

    def set_attr(self: Any, key: str, value: Any) -> None:
        kind = self.get_element_ty() if self.dtype.is_ptr() else None
        step = kind.primitive_bitwidth // 8 if kind else 1  # from an address to the next
        if key in _NAMES and (words := broken(key, self.data, value, step)):
            note(words, self.data.size == 1)
        plain(self, key, value)

    handle.set_attr = set_attr


def broken(key: str, data: Any, values: Sequence[int], step: int = 1) -> str:
    """What is not as it was promised; empty where it is, or cannot be told.

    >>> broken("tt.divisibility", np.array([32]), [16]), broken("tt.contiguity", np.arange(8), [8])
    ('', '')
    >>> broken("tt.divisibility", np.array([33]), [16])
    'tl.multiple_of(…, 16) is not true: it is 33'
    >>> broken("tt.contiguity", np.arange(0, 16, 2), [8])
    'tl.max_contiguous(…, 8) is not true: 0 is followed by 2'
    >>> broken("tt.constancy", np.array([[1, 1, 2, 2]]), [1, 2]), broken("tt.constancy", np.array([1, 2]), [2])
    ('', 'tl.max_constancy(…, 2) is not true: 1 is followed by 2')
    """
    block = np.asarray(data)
    if block.ndim != len(values):
        block = block.reshape(-1)
    if block.ndim != len(values) or not np.issubdtype(block.dtype, np.integer):
        return ""
    block = block.astype(np.int64)  # differences of unsigned numbers, as addresses are, have no sign
    call = f"tl.{_NAMES[key]}(…, {', '.join(map(str, values))}) is not true"
    if key == "tt.divisibility":  # of a block: where it begins, since the others follow by what is told of their order
        first = int(block.flat[0])
        return f"{call}: it is {first}" if first % max(1, *values) and len(values) == 1 else ""
    for axis, count in enumerate(values):
        steps = np.moveaxis(np.diff(block, axis=axis), axis, 0)
        inside = np.arange(len(steps)) % max(1, count) != count - 1  # of a group of so many, which begins at a multiple
        wrong = np.argwhere(steps[inside] != (step if key == "tt.contiguity" else 0))
        if len(wrong):
            at = (np.flatnonzero(inside)[wrong[0][0]], *wrong[0][1:])
            lines = np.moveaxis(block, axis, 0)
            return f"{call}: {lines[at]} is followed by {lines[(at[0] + 1, *at[1:])]}"
    return ""
