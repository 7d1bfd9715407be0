"""The script that runs solutions on a GPU: it must tell right from wrong, and a met goal from a missed one."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from sublight.correct import worst
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.grade.cases import Case
from sublight.learn.grade.timed_fakes import TIMED

RUN = Path(__file__).parent / "learn_solutions_h200.json"


@pytest.fixture(scope="module")
def script() -> Any:
    return importlib.import_module("benchmarks.learn_solutions")


def test_wrong_results_are_seen(script: Any) -> None:
    copy = find("copy")
    case = Case(shape={"numel": 100}, dtype="float32")

    def half(x: Any, out: Any) -> None:
        out[:50] = x[:50]

    assert worst(script.errors(copy, lambda x, out: out.copy_(x), case, "cpu", 0)).ok
    assert worst(script.errors(copy, half, case, "cpu", 0)).misplaced == 50


def test_table_counts_goals_and_cheats(script: Any) -> None:
    row = {"name": "copy", "goal": 0.9, "wrong": "", "failure": "", "faults": []}
    timed = row | {"seconds": 1e-5}
    rows = [timed | {"fraction": 0.95}, timed | {"fraction": 0.5}, row | {"wrong": "out is off"}, row]
    kept, timer = (next(cheat for cheat in TIMED if word in cheat.name) for word in ("kept", "timers"))
    refused = {"failure": "", "faults": ["values: out[0] is 1, expected 2"]}
    as_fast, faster = ({"failure": "", "faults": [], "seconds": each} for each in (1e-5, 0.9e-5))
    outcomes = [script.outcome_of(*each, 1e-5) for each in
                ((kept, refused), (kept, as_fast), (timer, as_fast), (timer, faster), (timer, refused))]  # fmt: skip
    lines = script.table(rows, outcomes).splitlines()
    assert lines[2].endswith("below its goal") and "below" not in lines[1] and lines[3].endswith("out is off")
    assert lines[4].endswith("no time left") and lines[5] == "3 of 4 right, 1 of 2 timed reach their goal"
    assert [each["is_held"] for each in outcomes] == [True, False, True, False, False]
    assert lines[-1] == "2 of 5 cheats held"


def test_every_solution_reached_its_goal_on_an_h200_and_the_docs_say_how_far() -> None:
    run = json.loads(RUN.read_text(encoding="utf-8"))
    rows = {row["exercise"]: row for row in run["rows"]}
    goals = {each.name: each.goal for each in EXERCISES if each.kind == "kernel" and each.goal}
    assert set(rows) == set(goals)
    for name, row in rows.items():
        assert row["shape"] == goals[name].timed_shape and row["fraction"] >= goals[name].fraction, name
    assert all(each["is_held"] for each in run["cheats"]) and len(run["cheats"]) == len(TIMED)
    words = " ".join((RUN.parents[1] / "docs" / "learn.md").read_text(encoding="utf-8").split())
    assert f"all {len(rows)} solutions reach their goals (benchmarks/{RUN.name})" in words
    named = {"matmul": "matmul with", "flash_attention": "flash attention with", "flash_backward": "backward pass with"}
    for name, before in named.items():
        assert f"{before} {rows[name]['fraction']:.2f}" in words
