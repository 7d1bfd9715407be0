"""`sublight learn` without a check: pages, files, hints, solutions, goals, and what is refused in one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sublight.cli import learn
from sublight.cli import main as cli
from sublight.learn.exercises import EXERCISES, find
from sublight.learn.progress import Progress
from sublight.learn.progress_test import verdict

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Say:
    """Run `sublight learn` with these words in a folder of its own: its status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LANG", "en_US.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.delenv("LC_MESSAGES", raising=False)
    monkeypatch.setenv("SUBLIGHT_LEARN", str(tmp_path / "progress" / "learn.sqlite"))
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        status = cli.run(["learn", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def test_the_map_names_every_exercise_and_what_comes_next(say: Say) -> None:
    status, out, _ = say()
    assert status == 0 and all(exercise.name in out for exercise in EXERCISES)
    assert "next: sublight learn start copy" in out and max(map(len, out.splitlines())) <= 80
    Progress().add(verdict("copy", passed=True), "")
    _, out, _ = say()
    assert "✓  copy" in out and "50 %" in out and "next: sublight learn start add" in out


def test_start_writes_the_starter_once(say: Say) -> None:
    status, out, _ = say("start", "add")
    assert status == 0 and "yours to fill in" in out
    file = Path("learn/add.py")
    assert file.read_text(encoding="utf-8") == find("add").starter()
    file.write_text("my work", encoding="utf-8")
    status, out, _ = say("start", "add")
    assert status == 0 and "was left as it is" in out and file.read_text(encoding="utf-8") == "my work"


def test_start_without_a_name_begins_what_is_next(say: Say) -> None:
    Progress().add(verdict("copy", passed=True), "")
    assert json.loads(say("start", "--json", "-")[1])["exercise"] == "add"


def test_hints_come_one_by_one(say: Say) -> None:
    shown = [json.loads(say("hint", "copy", "--json", "-")[1]) for _ in range(3)]
    assert [each["hint"] for each in shown] == [1, 2, 3]
    every = " ".join(say("hint", "copy")[1].split())  # once the last is shown, all are again
    assert every.endswith("all 3 hints; there is no other")
    assert all(each["text"].splitlines()[0].removeprefix("## ") in every for each in shown)


def test_the_solution_waits_for_a_pass(say: Say) -> None:
    status, out, err = say("solution", "copy")
    assert status == 2 and not out and "has not passed yet" in err and err.count("\n") == 1
    assert "triton.cdiv(n, BLOCK)" in say("solution", "copy", "--anyway")[1]
    Progress().add(verdict("copy", passed=True), "")
    assert "Common mistakes" in say("solution", "copy")[1]


def test_texts_in_chinese(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "你的任务" in say("show", "copy", "--lang", "zh")[1]
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    for word in ("copy", "matmul", "histogram"):
        assert "你的任务" in say(word)[1]
    assert "第 1 个提示，共 3 个" in say("hint", "matmul")[1]
    assert "已经建好" in say("start", "matmul")[1] and "原来就有" in say("start", "matmul")[1]
    assert "下一个：sublight learn start copy" in say()[1] and "复制一个向量" in say("next")[1]
    status, out, err = say("solution", "copy")
    assert status == 2 and not out and "还没有通过" in err and err.count("\n") == 1


def test_a_goal_shows_the_shortest_way(say: Say) -> None:
    status, out, _ = say("goal", "row_sum", "--by", "2099-01-31")
    assert status == 0 and "to row_sum by 2099-01-31: 5 left" in out
    assert json.loads(say("goal", "--json", "-")[1])["left"] == ["copy", "add", "strides", "add_2d", "row_sum"]
    assert "goal: row_sum by 2099-01-31" in say()[1]
    assert say("next")[1].splitlines()[-1] == "sublight learn start copy"
    assert say("goal", "row_sum", "--by", "never")[0] == 0 and "goal: row_sum" not in say()[1]


def test_the_roadmap_as_a_page(say: Say) -> None:
    """Goals, the way to the first of them, and every exercise; what is done is marked."""
    Progress().add(verdict("copy", passed=True), "")
    say("goal", "flash_attention", "--by", "2099-01-31")
    assert say("--html", "roadmap.html")[0] == 0
    page = Path("roadmap.html").read_text(encoding="utf-8")
    assert all(f"<b>{each.name}</b>" in page for each in EXERCISES)
    assert '<div class="card done"><b>copy</b>' in page and '<div class="card next way"><b>add</b>' in page
    assert "<li><code>flash_attention</code>" in page and "2099-01-31" in page
    assert "<script" not in page


def test_progress_goes_to_another_machine(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    Progress().add(verdict("copy", passed=True), "")
    assert say("export", "progress.json")[0] == 0
    monkeypatch.setenv("SUBLIGHT_LEARN", "other.sqlite")
    assert "1 rows" in say("import", "progress.json")[1]
    assert Progress().state("copy").has_passed


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["begin"], "unknown word 'begin': use show, start, check,"),
        (["copy", "add"], "unknown word 'copy'"),
        (["start", "sofmax"], "did you mean softmax"),
        (["start", "../x"], "unknown exercise"),
        (["check"], "which exercise?"),
        (["check", "copy"], "sublight learn start copy"),
        (["check", "nowhere/mine.py"], "nowhere/mine.py has the name of no exercise"),
        (["check", "nowhere/copy.py"], "there is no nowhere/copy.py"),
        (["show", "copy", "--lang", "fr"], "unknown language 'fr'"),
        (["goal"], "no goal is set"),
        (["goal", "copy", "--by", "soon"], "write a date"),
        (["goal", "copy", "--by", "never"], "is no goal of yours"),
        (["next", "--html", "page.html"], "--html goes with the map"),
        (["goal", "copy", "--by", "2001-01-01"], "is past"),
        (["check", "copy", "--anyway"], "--anyway goes with"),
        (["start", "copy", "--by", "2099-01-01"], "--by goes with"),
        (["next", "copy"], "takes no name"),
        (["export"], "export to which file"),
        (["import", "nothing.json"], "cannot read nothing.json"),
        (["hint", "copy", "--json", "/"], "cannot write"),
        (["ask", "copy", "--out", "-"], "--out - is not printed: name a file"),
    ],
)
def test_what_cannot_be_done_is_one_line(say: Say, words: list[str], reason: str) -> None:
    status, out, err = say(*words)
    assert status == 2 and not out and reason in err and err.count("\n") == 1
    assert not Path("learn").exists()


def test_a_file_that_is_no_text(say: Say) -> None:
    Path("copy.py").write_bytes(b"\xff\xfe\x00")
    status, _, err = say("check", "copy.py")
    assert status == 2 and "UTF-8" in err


def test_watch_checks_what_is_saved_and_ends_with_a_pass(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a check that takes no time: only sources that differ are checked."""
    say("start", "copy")
    file, seen = Path("learn/copy.py"), []

    def checked(exercise: object, source: str, *rest: object) -> object:
        seen.append(source)
        return verdict("copy", passed="mask" not in source)

    def slept(seconds: float) -> None:
        if file.read_text(encoding="utf-8") == seen[-1] and len(seen) == 1:
            file.write_text("right", encoding="utf-8")

    monkeypatch.setattr(learn, "_checked", checked)
    monkeypatch.setattr(learn.time, "sleep", slept)
    monkeypatch.setattr("sublight.learn.grade.crew.Crew", contextlib.nullcontext)
    status, out, _ = say("watch", "copy", "--gpu", "h200")
    assert status == 0 and len(seen) == 2 and "save to check again" in out and "passed" in out
