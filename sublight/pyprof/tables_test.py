"""Own and total time, what counts of a thread that waits, trees and their spans, and two runs compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublight.errors import BadInput
from sublight.pyprof import compare, record
from sublight.pyprof.fakes import MS, sampled, traced
from sublight.pyprof.record import PythonProfile, merged
from sublight.pyprof.tables import split, tables
from sublight.pyprof.tree import trees
from sublight.sampling import UNKNOWN, Row


def test_own_and_total_time_of_looks() -> None:
    found = tables(sampled())
    by_name = {one.frame.function: one for one in found.functions}
    assert by_name["hot"].own_s == pytest.approx(0.06)
    assert by_name["<module>"].own_s == 0 and by_name["<module>"].total_s == pytest.approx(0.1)
    assert by_name["Condition.wait"].own_s == pytest.approx(0.02), "the worker's idle time does not count"
    assert by_name["Condition.wait"].own.idle_s == pytest.approx(0.12)
    assert by_name["cold"].own.gil_s == pytest.approx(0.01) and by_name["cold"].own.ran_s == pytest.approx(0.01)
    assert found.counted_s == pytest.approx(0.1) and sum(one.own_s for one in found.functions) == pytest.approx(0.1)
    threads = dict(found.threads)
    assert threads["worker"].idle_s == pytest.approx(0.1) and threads["worker"].busy_s == 0
    assert by_name["hot"].line == 12 and found.lines[0].frame.line == 12


def test_a_function_that_calls_itself_counts_once() -> None:
    found = {one.frame.function: one for one in tables(traced()).functions}
    assert found["fib"].total_s == pytest.approx(0.08) and found["fib"].own_s == pytest.approx(0.03 + 0.04)
    assert found["fib"].calls == 3 and found["builtins.len"].calls == 4
    assert found["<module>"].own_s == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (Row(0, 0, 0, 10 * MS, UNKNOWN), (0.01, 0, 0, 0)),
        (Row(0, 0, 0, 10 * MS, 4 * MS), (0.004, 0, 0, 0.006)),
        (Row(0, 0, 0, 10 * MS, 12 * MS, 0, 3 * MS, 3 * MS), (0.01, 0, 0, 0)),  # clocks need not agree
        (Row(0, 0, 0, 10 * MS, 5 * MS, 0, 9 * MS, 2 * MS), (0.005, 0.003, 0.002, 0)),
    ],
)
def test_parts_of_a_look_add_up(row: Row, parts: tuple[float, ...]) -> None:
    found = split(row)
    assert (found.ran_s, found.gil_s, found.core_s, found.idle_s) == pytest.approx(parts)
    assert found.all_s == pytest.approx(0.01)


def test_trees_hold_the_same_time_as_tables() -> None:
    main, worker = trees(sampled())
    assert main.totals_s()[0] == pytest.approx(0.1) and worker.totals_s()[0] == 0
    assert [main.nodes[at].function[1] for at in main.path(3)] == ["<module>", "cold"]
    spans = {main.nodes[span.node].function[1]: span for span in main.spans}
    assert spans["<module>"].start_s == pytest.approx(0) and spans["<module>"].duration_s == pytest.approx(0.1)
    assert spans["cold"].start_s == pytest.approx(0.06) and spans["cold"].duration_s == pytest.approx(0.02)
    (tree,) = trees(traced())
    assert tree.totals_s()[0] == pytest.approx(0.1) and len(tree.spans) == 3


def test_a_thread_that_was_away_has_two_spans() -> None:
    profile = sampled()
    samples = profile.processes[0].samples
    assert samples is not None
    away = [row for row in samples.rows if row.thread == 0 and not 20 * MS < row.time_ns <= 80 * MS]
    process = replace(profile.processes[0], samples=replace(samples, rows=tuple(away)))
    (main,) = trees(replace(profile, processes=(process,)))
    assert sum(main.nodes[span.node].function[1] == "<module>" for span in main.spans) == 2


def test_looks_that_saw_the_same_are_kept_as_one() -> None:
    samples = sampled().processes[0].samples
    assert samples is not None
    short = merged(samples)
    assert len(short.rows) == 4 and sum(row.wall_ns for row in short.rows) == sum(row.wall_ns for row in samples.rows)
    assert sum(row.gil_ns for row in short.rows) == sum(row.gil_ns for row in samples.rows)


@pytest.mark.parametrize("made", [sampled, traced])
def test_a_profile_survives_json(made: object) -> None:
    profile: PythonProfile = made()  # type: ignore[operator]
    assert PythonProfile.from_json(profile.to_json()) == profile


def test_what_is_no_profile_is_refused(tmp_path: object) -> None:
    for data in ({}, [], {"format": record.FORMAT}, {**sampled().to_json(), "mode": "guess"}):
        with pytest.raises(ValueError, match=r"this|unknown mode"):
            PythonProfile.from_json(data)
    data = sampled().to_json()
    data["processes"][0]["samples"]["rows"][0][2] = 99
    with pytest.raises(ValueError):
        PythonProfile.from_json(data)
    for name in ("missing.json", str(tmp_path)):
        with pytest.raises(BadInput):
            record.read(name)


def test_two_runs_differ_by_function() -> None:
    found = compare.compare(sampled(), sampled(slower=2.0))
    assert (found.changes[0].function, found.changes[0].change_s) == ("hot", pytest.approx(0.06))
    assert all(change.change_s == pytest.approx(0) for change in found.changes[1:])
    by_total = {one.function: one.total_change_s for one in found.changes}
    assert by_total["<module>"] == pytest.approx(0.06), "it calls hot"
    renamed = {one.function: one for one in compare.compare(sampled(), sampled(name="warm")).changes}
    assert renamed["hot"].after_s == 0 and renamed["warm"].before_s == 0
    with pytest.raises(BadInput, match="do not compare"):
        compare.compare(sampled(), traced())
