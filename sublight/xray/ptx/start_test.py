"""Which blocks are followed."""

from __future__ import annotations

from typing import Any

import pytest

from sublight.xray.ptx.start import chosen_blocks


@pytest.mark.parametrize(
    ("grid", "count", "chosen"),
    [((1, 1, 1), 3, [(0, 0, 0)]), ((9, 1, 1), 3, [(1, 0, 0), (3, 0, 0), (8, 0, 0)]), ((2, 2, 1), 9, 4)],
)
def test_blocks_that_are_followed(grid: tuple[int, int, int], count: int, chosen: Any) -> None:
    found = chosen_blocks(grid, count)
    assert len(found) == chosen if isinstance(chosen, int) else list(found) == chosen


@pytest.mark.parametrize("grid", [(1000, 1, 1), (8, 8, 1), (8, 64, 2), (3, 41, 1), (16, 1024, 1)])
def test_blocks_are_followed_as_often_as_they_occur(grid: tuple[int, int, int]) -> None:
    """The last of each row of blocks, which may be cut short: its share of those followed is its share of the grid."""
    found = chosen_blocks(grid, 8)
    assert len(set(found)) == 8
    share = sum(x == grid[0] - 1 for x, _, _ in found) / 8
    assert abs(share - 1 / grid[0]) <= 1 / 8
