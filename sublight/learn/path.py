"""The way through the exercises: what comes next, and the shortest way to a goal."""

from __future__ import annotations

from collections.abc import Mapping

from sublight.learn.exercises import EXERCISES, find
from sublight.learn.progress import State
from sublight.learn.record import Exercise


def way_to(exercise: Exercise, states: Mapping[str, State]) -> list[Exercise]:
    """What is left to do for it, in the order of the path: everything that it needs, and itself."""
    wanted, ahead = set(), [exercise.name]
    while ahead:
        name = ahead.pop()
        if name not in wanted and not states.get(name, State()).has_passed:
            wanted.add(name)
            ahead += find(name).needs
    return [each for each in EXERCISES if each.name in wanted]


def next_one(states: Mapping[str, State], goal: str = "") -> Exercise | None:
    """On the way to the goal where there is one left to reach, else the first that has not passed; None: all have."""
    way = way_to(find(goal), states) if goal else []
    left = way or [each for each in EXERCISES if not states.get(each.name, State()).has_passed]
    return left[0] if left else None
