"""The script that runs solutions on a GPU: it must tell right from wrong, and a met goal from a missed one."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from sublight.correct import worst
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.grade.cases import Case

RUN = Path(__file__).parent / "learn_larger_h200.json"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("learn_solutions", Path(__file__).parent / "learn_solutions.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wrong_results_are_seen(script: Any) -> None:
    copy = find("copy")
    case = Case(shape={"numel": 100}, dtype="float32")

    def half(x: Any, out: Any) -> None:
        out[:50] = x[:50]

    assert worst(script.errors(copy, lambda x, out: out.copy_(x), case, "cpu", 0)).ok
    assert worst(script.errors(copy, half, case, "cpu", 0)).misplaced == 50


def test_table_counts_goals(script: Any) -> None:
    row = {"exercise": "copy", "goal": 0.9, "wrong": "", "median_s": 1e-5}
    rows = [row | {"fraction": 0.95}, row | {"fraction": 0.5}, {"exercise": "add", "goal": 0.9, "wrong": "out is off"}]
    lines = script.table(rows).splitlines()
    assert lines[2].endswith("below its goal") and "below" not in lines[1] and lines[3].endswith("out is off")
    assert lines[-1] == "2 of 3 right, 1 of 2 timed reach their goal"


BELOW = ("embedding_backward", "histogram")  # docs/learn.md says so


def test_the_docs_name_the_goals_that_no_solution_reached_on_an_h200() -> None:
    rows = {row["exercise"]: row for row in json.loads(RUN.read_text(encoding="utf-8"))["rows"]}
    goals = {each.name: each.goal for each in EXERCISES if each.kind == "kernel" and each.goal}
    assert set(rows) == set(goals)
    assert tuple(sorted(name for name, row in rows.items() if row["fraction"] < goals[name].fraction)) == BELOW
    words = " ".join((RUN.parents[1] / "docs" / "learn.md").read_text(encoding="utf-8").split())
    assert f"{len(rows) - len(BELOW)} of {len(rows)} reach their goals" in words
    for name in BELOW:
        assert f"`{name}` {rows[name]['fraction']:.2f} of {goals[name].fraction:.2f}" in words
    first = {name for name, row in rows.items() if row["shape"] != goals[name].timed_shape}
    assert first == {"copy", "add", "add_2d", "multiply_add", "softmax", "rms_norm", "transpose"}
