"""Two profiles of the same program: which functions take longer, and which less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sublight.errors import BadInput
from sublight.pyprof.record import PythonProfile
from sublight.pyprof.tables import Figure, tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A function before and after; a file that moved is another function, a function that moved in its file is not."""

    file: str
    function: str
    before_s: float  # own
    after_s: float
    total_before_s: float
    total_after_s: float
    calls_before: int
    calls_after: int

    @property
    def change_s(self) -> float:
        return self.after_s - self.before_s

    @property
    def total_change_s(self) -> float:
        return self.total_after_s - self.total_before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    before: PythonProfile
    after: PythonProfile
    changes: tuple[Change, ...]  # the largest first, whichever way

    def to_json(self) -> dict[str, Any]:
        names = ("file", "function", "before_s", "after_s", "total_before_s", "total_after_s")
        counts = ("calls_before", "calls_after")
        return {
            "before": {"command": self.before.command, "wall_s": self.before.wall_s},
            "after": {"command": self.after.command, "wall_s": self.after.wall_s},
            "changes": [{name: getattr(one, name) for name in (*names, *counts)} for one in self.changes],
        }


def compare(before: PythonProfile, after: PythonProfile) -> Comparison:
    if before.mode != after.mode:
        raise BadInput(f"a profile by --{before.mode} and one by --{after.mode} do not compare: take both the same way")
    old, new = _by_function(before), _by_function(after)
    changes = []
    for key in {**old, **new}:
        a, b = old.get(key, []), new.get(key, [])
        changes.append(
            Change(
                file=key[0],
                function=key[1],
                before_s=sum(one.own_s for one in a),
                after_s=sum(one.own_s for one in b),
                total_before_s=sum(one.total_s for one in a),
                total_after_s=sum(one.total_s for one in b),
                calls_before=sum(one.calls for one in a),
                calls_after=sum(one.calls for one in b),
            )
        )

    def size(one: Change) -> tuple[float, float, int, str]:
        return (-abs(one.change_s), -abs(one.total_change_s), -abs(one.calls_after - one.calls_before), one.function)

    return Comparison(before=before, after=after, changes=tuple(sorted(changes, key=size)))


def _by_function(profile: PythonProfile) -> dict[tuple[str, str], list[Figure]]:
    found: dict[tuple[str, str], list[Figure]] = {}
    for figure in tables(profile).functions:
        found.setdefault((figure.frame.file, figure.frame.function), []).append(figure)
    return found
