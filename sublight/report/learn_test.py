"""`sublight learn`'s pages in both languages: the same facts, and in Chinese no line wider than the terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import date

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from sublight.learn.exercises import CHAPTERS, EXERCISES, find
from sublight.learn.progress import Attempt, DatedGoal, State
from sublight.learn.progress_test import verdict
from sublight.learn.texts import text_of
from sublight.learn.verdict import Fault, Verdict
from sublight.learn.words import CHINESE
from sublight.report import learn, roadmap

TODAY = date(2027, 1, 17)
GOALS = (DatedGoal(exercise="softmax", due="2027-01-31"), DatedGoal(exercise="copy", due=""))
STATES = {
    "copy": State(attempts=(Attempt(at="2027-01-15T10:00:00", passed=True, fraction=0.95),)),
    "add": State(attempts=tuple(Attempt(at=f"2027-01-16T1{n}:00:00", passed=False, fraction=n / 9) for n in (3, 5))),
}
VERDICTS = [
    verdict("copy", passed=True),
    replace(verdict("strides", passed=True), kernels=(), floor_s=None),
    replace(verdict("copy", passed=False), faults=(Fault(kind="goal", text="slow"),)),
    replace(verdict("read_xray", passed=False), faults=(Fault(kind="answer", text="SECTORS has no answer yet"),)),
    replace(verdict("copy", passed=False), faults=(Fault(kind="values", text="wrong", case="n = 7, float32"),)),
]


def lines_of(shown: RenderableType) -> list[str]:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(shown)
    return capture.get().splitlines()


@pytest.mark.parametrize("shown", VERDICTS, ids=lambda each: f"{each.exercise}-{len(each.faults)}")
def test_a_verdict_in_both_languages(shown: Verdict) -> None:
    """English as the verdict says it itself; in Chinese the fault's text, its case and the figures are the same."""
    assert lines_of(learn.verdict_page(shown))[0] == shown.sentence
    chinese = lines_of(learn.verdict_page(shown, "zh"))
    assert chinese[0].startswith(f"{shown.exercise}：") and chinese[0] != shown.sentence
    words = "\n".join(chinese)
    assert all(fault.text in words and fault.case in words for fault in shown.faults)
    assert all(cell_len(line) <= 80 for line in chinese)


def test_pages_fit_eighty_columns_in_chinese() -> None:
    """The map, a goal, and exercises with pictures or long lines of code."""
    pages = [learn.map_page(STATES, GOALS, "zh", TODAY), learn.goal_page(GOALS[0], EXERCISES, "zh")]
    for name in ("rope", "read_xray", "flash_backward"):
        text = text_of(find(name), "zh")
        pages += [learn.markdown(text.page), learn.hint_page(name, text, 3, 3)]
    for page in pages:
        assert [
            line for line in lines_of(page) if cell_len(line) > 80 or line.strip()[:1] in tuple("，。：；、）")
        ] == []


def test_chinese_lines_are_filled() -> None:
    """A line breaks between characters: Rich would break this one before its first space, at 30 cells."""
    first = lines_of(learn.markdown("attention 本身不知道哪个 token 在前。" + "旋转位置编码告诉它这一点。" * 5))[0]
    assert 78 <= cell_len(first.rstrip()) <= 80


def test_the_map_is_chinese() -> None:
    words = "\n".join(lines_of(learn.map_page(STATES, GOALS, "zh", TODAY)))
    assert all(CHINESE[title] in words for title in CHAPTERS.values())
    assert "目标：softmax，期限 2027-01-31：还剩" in words and "目标：copy：已达到" in words
    assert "下一个：sublight learn start add" in words and "41 个练习，通过 1 个" in words


def test_the_roadmap_is_chinese() -> None:
    page = roadmap.page(STATES, GOALS, "zh", TODAY)
    assert '<html lang="zh">' in page and "到 <code>softmax</code> 的最短路径" in page
    assert "检查 2 次" in page and "极限的 95 %" in page and "14 天，每周" in page and "先做 copy" in page
    assert not [words for words in CHINESE if words[0].isupper() and words in page]
    assert "还没有目标：用 <code>sublight learn goal" in roadmap.page({}, (), "zh", TODAY)
