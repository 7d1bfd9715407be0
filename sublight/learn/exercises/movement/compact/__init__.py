"""Compaction: the chosen elements first, in their order; a running sum says where each goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sublight.learn.record import Exercise, Goal, problem_of


def _of_sizes(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Where there are no data, nobody can choose by them: sizes and types alone."""

    def call(x: Any, keep: Any) -> Any:
        if x.is_meta:
            return x.new_empty(x.shape), keep.sum()
        return reference(x, keep)

    return call


COMPACT = Exercise(
    name="compact",
    chapter="movement",
    problem=partial(problem_of, "compact", around=_of_sizes),
    cost="compact",
    arguments=("x", "keep"),
    outputs=("out", "count"),
    sizes={"numel": (1, 5000)},
    shown={"numel": 3000},
    goal=Goal(shape={"numel": 2**19}, fraction=0.5, on_gpu={"numel": 2**25}),
    needs=("row_sum", "permute_rows"),
)
