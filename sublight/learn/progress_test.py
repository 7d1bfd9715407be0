"""Progress in its file: kept, counted, exported, merged; and the way through the exercises that follows from it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.learn import path
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.progress import Attempt, DatedGoal, Progress, State, parse_due
from sublight.learn.verdict import Fault, KernelFigures, Verdict

PASSED = State(attempts=(Attempt(at="", passed=True, fraction=0.95),))


WHEN = "2026-01-01T00:00:00+00:00"


def of_rows(**rows: list[object]) -> str:
    """An exported file with one row in the tables that are named."""
    tables = {name: [rows[name]] if name in rows else [] for name in ("attempts", "hints", "goals")}
    return json.dumps({"sublight_learn": 1, **tables})


def verdict(name: str, *, passed: bool, seconds: float = 2.0) -> Verdict:
    kernel = KernelFigures(name="k", registers=20, spill_bytes=0, occupancy=1.0, limited_by="", sectors=4,
                           ideal_sectors=4, programs=1, seconds=seconds, sentence="")  # fmt: skip
    faults = () if passed else (Fault(kind="values", text="wrong"),)
    return Verdict(exercise=name, file="", faults=faults, gpu="h200", kernels=(kernel,), floor_s=1.0)


def test_attempts_hints_and_goal_are_kept(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "deep" / "learn.sqlite")
    assert progress.states() == {} and progress.goals() == []
    progress.add(verdict("copy", passed=False), "a")
    assert not progress.state("copy").has_passed and progress.state("copy").best is None
    progress.add(verdict("copy", passed=True), "b")
    progress.add(verdict("copy", passed=True, seconds=4.0), "c")
    state = Progress(progress.file).state("copy")
    assert state.has_passed and state.best == 0.5 and len(state.attempts) == 3
    assert [progress.show_hint("add", 3) for _ in range(5)] == [1, 2, 3, 4, 4]
    assert progress.state("add").hints == 3
    progress.set_goal("softmax", "")
    progress.set_goal("rms_norm", "2099-01-31")
    progress.set_goal("softmax", "2098-01-31")
    assert [(each.exercise, each.due) for each in progress.goals()] == [
        ("softmax", "2098-01-31"),
        ("rms_norm", "2099-01-31"),
    ]
    assert progress.drop_goal("softmax") and not progress.drop_goal("softmax")


def test_exported_and_imported(tmp_path: Path) -> None:
    one, other = Progress(tmp_path / "one.sqlite"), Progress(tmp_path / "other.sqlite")
    one.add(verdict("copy", passed=True), "a")
    one.add(dataclasses.replace(verdict("add", passed=False), kernels=()), "b")  # wrong code has no fraction
    one.show_hint("add", 3)
    one.set_goal("softmax", "")
    file = tmp_path / "progress.json"
    file.write_text(json.dumps(one.to_json()), encoding="utf-8")
    other.set_goal("copy", "")
    assert other.merge(file) == 4 and other.merge(file) == 0  # nothing comes twice
    assert other.states() == one.states()
    assert {each.exercise for each in other.goals()} == {"copy", "softmax"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "holds no progress"),
        ("[1]", "holds no progress"),
        ('{"sublight_learn": 1, "attempts": [[1]], "hints": [], "goals": []}', "holds no progress"),
        (of_rows(attempts=["copy", WHEN, 1, 1, {"a": 1}, "h200", ""]), "holds no progress"),
        (of_rows(attempts=["copy", WHEN, 1, 1, float("nan"), "h200", ""]), "holds no progress"),
        (of_rows(attempts=["copy", "yesterday", 1, 1, 0.5, "h200", ""]), "holds no progress"),
        (of_rows(hints=["copy", "many", WHEN]), "holds no progress"),
        (of_rows(goals=["copy", "soon", WHEN]), "holds no progress"),
        ('{"sublight_learn": 2}', "version 2"),
    ],
)
def test_files_that_are_none(tmp_path: Path, words: str, reason: str) -> None:
    file = tmp_path / "progress.json"
    file.write_text(words, encoding="utf-8")
    with pytest.raises(BadInput, match=reason):
        Progress(tmp_path / "learn.sqlite").merge(file)


def test_a_goal_that_only_a_newer_version_knows_is_no_goal_here(tmp_path: Path) -> None:
    file = tmp_path / "progress.json"
    file.write_text(of_rows(goals=["of_tomorrow", "2099-01-31", WHEN]), encoding="utf-8")
    progress = Progress(tmp_path / "learn.sqlite")
    assert progress.merge(file) == 1 and progress.goals() == []


def test_a_file_that_cannot_be_kept(tmp_path: Path) -> None:
    file = tmp_path / "learn.sqlite"
    file.write_text("this is no database, and long enough to be seen as none", encoding="utf-8")
    with pytest.raises(BadInput, match="set SUBLIGHT_LEARN"):
        Progress(file).states()


def test_rows_that_another_hand_wrote_are_taken_as_far_as_they_go(tmp_path: Path) -> None:
    file = tmp_path / "learn.sqlite"
    progress = Progress(file)
    progress.add(verdict("copy", passed=True), "a")
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("INSERT INTO attempts VALUES ('copy', NULL, 1, 1, 0.5, 'h200', '')")
        connection.execute("INSERT INTO attempts VALUES ('copy', '2026-01-01', 1, 1, 'fast', 'h200', '')")
    assert [each.fraction for each in progress.state("copy").attempts] == [None, 0.5]


def test_dates() -> None:
    assert parse_due("2099-01-31") == "2099-01-31"
    with pytest.raises(BadInput, match="write a date"):
        parse_due("soon")


def test_the_shortest_way() -> None:
    assert [each.name for each in path.way_to(find("softmax"), {})] == [
        "copy", "add", "strides", "add_2d", "row_sum", "softmax",
    ]  # fmt: skip
    assert [each.name for each in path.way_to(find("softmax"), {"add_2d": PASSED})] == ["row_sum", "softmax"]
    assert path.way_to(find("copy"), {"copy": PASSED}) == []


def test_day_by_day() -> None:
    """A fraction below the goal counts for its part, passing for all of it; nothing is lost again."""
    half = find("copy").goal.fraction / 2  # type: ignore[union-attr]
    attempts = (
        Attempt(at="2027-01-01T10", passed=False, fraction=None),
        Attempt(at="2027-01-02T10", passed=False, fraction=half),
        Attempt(at="2027-01-04T10", passed=True, fraction=0.95),
        Attempt(at="2027-01-05T10", passed=False, fraction=0.1),
    )
    days = path.days({"copy": State(attempts=attempts)})
    assert [day.date for day in days] == ["2027-01-01", "2027-01-02", "2027-01-04", "2027-01-05"]
    assert [day.share * len(EXERCISES) for day in days] == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert [day.passed for day in days] == [0, 0, 1, 1]


def test_what_comes_next() -> None:
    assert path.next_one({}) is find("copy")
    assert path.next_one({"copy": PASSED}) is find("add")
    assert path.next_one({"copy": PASSED}, [DatedGoal(exercise="blocks")]) is find("blocks")
    assert path.next_one({"copy": PASSED}, [DatedGoal(exercise="copy")]) is find(
        "add"
    )  # the goal is reached: on along the path
    assert path.next_one({each.name: PASSED for each in EXERCISES}) is None
