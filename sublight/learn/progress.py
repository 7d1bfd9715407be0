"""What a learner has done, in one SQLite file: attempts with the fraction reached, hints, own goals with dates."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublight.errors import BadInput, refuse_device
from sublight.learn.exercises import CUDA_EXERCISES, EXERCISES
from sublight.learn.verdict import Verdict

VERSION = 1
_TABLES = {
    "attempts": "exercise TEXT, at TEXT, passed INTEGER, is_right INTEGER, fraction REAL, gpu TEXT, source TEXT",
    "hints": "exercise TEXT, level INTEGER, at TEXT",
    "goals": "exercise TEXT, due TEXT, at TEXT",
}

_KINDS: dict[str, Any] = {"TEXT": (str,), "INTEGER": (int,), "REAL": (int, float)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One check."""

    at: str  # ISO, UTC
    passed: bool
    fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known of one exercise."""

    attempts: tuple[Attempt, ...] = ()
    hints: int = 0  # how many were shown

    @property
    def has_passed(self) -> bool:
        return any(attempt.passed for attempt in self.attempts)

    @property
    def best(self) -> float | None:
        return max((each.fraction for each in self.attempts if each.passed and each.fraction), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatedGoal:
    """What a learner wants to have passed, and until when."""

    exercise: str
    due: str = ""  # 2027-01-31; empty: no date


def default_file() -> Path:
    """SUBLIGHT_LEARN, else the user's data folder."""
    if chosen := os.environ.get("SUBLIGHT_LEARN"):
        return Path(chosen)
    base = os.environ.get("XDG_DATA_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "share") / "sublight" / "learn.sqlite"
    except RuntimeError:  # a user without a home, as some containers have
        raise BadInput("there is no home folder to keep progress in: set SUBLIGHT_LEARN to a file") from None


class Progress:
    """The file, opened for each use: a watch and a check may run side by side."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file or default_file()

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(self.file, timeout=30)) as connection, connection:
                for name, columns in _TABLES.items():
                    names = ", ".join(column.split()[0] for column in columns.split(", "))
                    connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns}, UNIQUE ({names}))")
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise BadInput(
                f"cannot keep progress in {self.file}: {error}; set SUBLIGHT_LEARN to another file"
            ) from None

    def add(self, verdict: Verdict, source: str) -> None:
        values = (verdict.exercise, _now(), verdict.has_passed, verdict.is_right, verdict.fraction, verdict.gpu, source)
        with self._open() as connection:
            connection.execute("INSERT OR IGNORE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def show_hint(self, exercise: str, levels: int) -> int:
        """The next hint's number, from 1; where all were shown, one more than there are."""
        with self._open() as connection:
            query = "SELECT COALESCE(MAX(level), 0) FROM hints WHERE exercise = ?"
            level = min(int(connection.execute(query, (exercise,)).fetchone()[0]), levels) + 1
            if level <= levels:
                connection.execute("INSERT OR IGNORE INTO hints VALUES (?, ?, ?)", (exercise, level, _now()))
        return level

    def set_goal(self, exercise: str, due: str) -> None:
        """One for each exercise."""
        with self._open() as connection:
            connection.execute("DELETE FROM goals WHERE exercise = ?", (exercise,))
            connection.execute("INSERT INTO goals VALUES (?, ?, ?)", (exercise, due, _now()))

    def drop_goal(self, exercise: str) -> bool:
        """Whether there was one."""
        with self._open() as connection:
            return connection.execute("DELETE FROM goals WHERE exercise = ?", (exercise,)).rowcount > 0

    def goals(self) -> list[DatedGoal]:
        """By date, those without one last. Of exercises that are not here, as a newer version may have, none."""
        with self._open() as connection:
            rows = connection.execute("SELECT exercise, due FROM goals ORDER BY due = '', due, at").fetchall()
        known = {each.name for each in (*EXERCISES, *CUDA_EXERCISES)}
        return [DatedGoal(exercise=name, due=due) for name, due in rows if name in known]

    def states(self) -> dict[str, State]:
        """The state of each exercise that was ever tried."""
        attempts: dict[str, list[Attempt]] = {}
        with self._open() as connection:
            for name, at, passed, fraction in connection.execute(
                "SELECT exercise, at, passed, CASE typeof(fraction) WHEN 'real' THEN fraction END FROM attempts "
                "WHERE typeof(exercise) = 'text' AND typeof(at) = 'text' ORDER BY at"
            ):
                attempts.setdefault(name, []).append(Attempt(at=at, passed=bool(passed), fraction=fraction))
            hints = dict(connection.execute("SELECT exercise, MAX(level) FROM hints GROUP BY exercise").fetchall())
        return {
            name: State(attempts=tuple(attempts.get(name, ())), hints=hints.get(name, 0))
            for name in {*attempts, *hints}
        }

    def state(self, exercise: str) -> State:
        return self.states().get(exercise, State())

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        with self._open() as connection:
            rows = {name: [list(row) for row in connection.execute(f"SELECT * FROM {name}")] for name in _TABLES}
        return {"sublight_learn": VERSION, **rows}

    def merge(self, file: Path) -> int:
        """Add what another file holds and this one does not; how many rows were new."""
        refuse_device(file)
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["sublight_learn"] != VERSION:
                raise BadInput(f"{file} is of version {data['sublight_learn']}, this is {VERSION}: update sublight")
            rows = {name: [tuple(row) for row in data[name]] for name in _TABLES}
            if not all(_fits(name, row) for name in _TABLES for row in rows[name]):
                raise ValueError
        except BadInput:
            raise
        except OSError as error:
            raise BadInput(f"cannot read {file}: {error.strerror}; name a file of `sublight learn export`") from None
        except (ValueError, KeyError, TypeError):
            raise BadInput(f"{file} holds no progress: name a file of `sublight learn export`") from None
        with self._open() as connection:
            before = connection.total_changes
            known = {name for (name,) in connection.execute("SELECT exercise FROM goals")}
            rows["goals"] = [row for row in rows["goals"] if row[0] not in known]
            for name in _TABLES:
                marks = ", ".join("?" * len(_TABLES[name].split(", ")))
                there = set(connection.execute(f"SELECT * FROM {name}"))  # to SQLite two rows with a NULL always differ
                new = [row for row in dict.fromkeys(rows[name]) if row not in there]
                connection.executemany(f"INSERT OR IGNORE INTO {name} VALUES ({marks})", new)
            return connection.total_changes - before


def _fits(table: str, row: tuple[Any, ...]) -> bool:
    """Whether a row that a file holds is one of this table's.

    >>> _fits("goals", ("copy", "2027-01-31", "2026-01-01T00:00:00")), _fits("goals", ("copy", "soon", ""))
    (True, False)
    """
    columns = [column.split() for column in _TABLES[table].split(", ")]
    if len(row) != len(columns):
        return False
    try:
        for column, value in zip(columns, row, strict=True):
            name, kind = column
            if value is None and name == "fraction":
                continue
            if not isinstance(value, _KINDS[kind]) or (kind == "REAL" and not 0 <= value < math.inf):
                return False
            if name == "at":
                datetime.datetime.fromisoformat(value)
            elif name == "due" and value:
                datetime.date.fromisoformat(value)
    except ValueError:
        return False
    return True


def parse_due(words: str) -> str:
    """
    >>> parse_due("2027-01-31")
    '2027-01-31'
    """
    try:
        return datetime.date.fromisoformat(words).isoformat()
    except ValueError:
        raise BadInput(f"--by {words}: write a date as 2027-01-31") from None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
