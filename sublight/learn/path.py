"""The way through the exercises: what comes next, the shortest way to a goal, and how much of it is behind one."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sublight.learn.exercises import EXERCISES, find
from sublight.learn.progress import DatedGoal, State
from sublight.learn.record import Exercise


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """Where a learner stood at the end of a day."""

    date: str  # 2027-01-31
    share: float  # of the whole way, from 0 to 1
    passed: int


def way_to(exercise: Exercise, states: Mapping[str, State]) -> list[Exercise]:
    """What is left to do for it, in the order of the path: everything that it needs, and itself."""
    wanted, ahead = set(), [exercise.name]
    while ahead:
        name = ahead.pop()
        if name not in wanted and not states.get(name, State()).has_passed:
            wanted.add(name)
            ahead += find(name).needs
    return [each for each in EXERCISES if each.name in wanted]


def next_one(states: Mapping[str, State], goals: Sequence[DatedGoal] = ()) -> Exercise | None:
    """On the way to the first goal that is not reached, else the first that has not passed; None: all have."""
    ways = [way_to(find(goal.exercise), states) for goal in goals]
    left = next(filter(None, ways), None) or [
        each for each in EXERCISES if not states.get(each.name, State()).has_passed
    ]
    return left[0] if left else None


def share(exercise: Exercise, state: State) -> float:
    """How far one exercise is: 1 once it has passed; before, the best fraction so far over the goal's."""
    if state.has_passed:
        return 1.0
    best = max((each.fraction or 0.0 for each in state.attempts), default=0.0)
    return min(1.0, best / exercise.goal.fraction) if exercise.goal else 0.0


def days(states: Mapping[str, State]) -> list[Day]:
    """Each day with a check, in order: what was reached up to its end."""
    dates = sorted({attempt.at[:10] for state in states.values() for attempt in state.attempts})
    found = []
    for date in dates:
        until = {
            name: State(attempts=tuple(each for each in state.attempts if each.at[:10] <= date))
            for name, state in states.items()
        }
        parts = [share(each, until.get(each.name, State())) for each in EXERCISES]
        passed = sum(until.get(each.name, State()).has_passed for each in EXERCISES)
        found.append(Day(date=date, share=sum(parts) / len(parts), passed=passed))
    return found


def days_left(goal: DatedGoal, today: datetime.date) -> int | None:
    """Until its date, below zero behind it; None without a date.

    >>> days_left(DatedGoal(exercise="softmax", due="2027-01-31"), datetime.date(2027, 1, 29))
    2
    """
    return (datetime.date.fromisoformat(goal.due) - today).days if goal.due else None
