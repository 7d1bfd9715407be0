"""tl.sum in the interpreter rounds as a GPU's tree of pairs does, not as numpy's row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sublight.xray.sanitize import folds
from sublight.xray.sanitize.memory import Array

ROWS = 1024


class Ops:
    """As much of the interpreter's ReduceOps as a sum takes."""

    axis: int | None
    keep_dims: bool

    def generic_reduce(self, input: Any) -> Any: ...

    def sum(self, input: Any) -> Any:
        return np.sum(input.handle.data, axis=self.axis, keepdims=self.keep_dims)

    def to_tensor(self, value: Any, dtype: Any) -> Any:
        return value


def total(data: Any, axis: int | None, *, keep_dims: bool = False) -> Any:
    class Own(Ops):
        pass

    scan = type("ScanOps", (), {"generic_scan": None})
    core = SimpleNamespace(tensor=object)
    folds.install(SimpleNamespace(ReduceOps=Own, ScanOps=scan, tl=SimpleNamespace(core=core)))
    ops = Own()
    ops.axis, ops.keep_dims = axis, keep_dims
    return ops.sum(SimpleNamespace(handle=SimpleNamespace(data=data), dtype=None))


def test_a_small_number_is_not_lost_behind_a_large_one() -> None:
    """Row by row 2**24 + 1 + 1 + … stays at 2**24 in float32; pairs keep all but the first."""
    tile = np.ones((ROWS, 3), np.float32)
    tile[0] = 2.0**24
    assert np.sum(tile, axis=0)[0] == 2.0**24
    assert total(tile, 0).tolist() == [2.0**24 + ROWS - 2] * 3


@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int32])
def test_shapes_and_types_are_numpys(axis: int | None, keep_dims: bool, kind: type) -> None:
    tile: Array = np.arange(4 * 6).reshape(4, 6).astype(kind)
    expected = np.sum(tile, axis=axis, keepdims=keep_dims)
    found = total(tile, axis, keep_dims=keep_dims)
    assert np.array_equal(found, expected) and np.shape(found) == np.shape(expected) and found.dtype == expected.dtype
