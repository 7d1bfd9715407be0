"""An exercise's pages in a notebook: what the command line shows, as Markdown."""

from __future__ import annotations

from pathlib import Path

import pytest

import sublight
from sublight.errors import BadInput
from sublight.learn.exercises import find
from sublight.learn.progress import Progress
from sublight.learn.progress_test import verdict
from sublight.learn.texts import text_of


@pytest.fixture(autouse=True)
def own_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SUBLIGHT_LEARN", str(tmp_path / "learn.sqlite"))


def test_a_page_with_the_code_to_begin_with() -> None:
    shown = sublight.learn.show("copy")._repr_markdown_()
    assert shown.startswith("# Copy a vector") and shown.endswith(f"```python\n{find('copy').starter()}```")
    assert "你的任务" in str(sublight.learn.show("copy", lang="zh"))
    assert "```cpp\n" in str(sublight.learn.show("add.cu"))


def test_hints_come_one_by_one_and_count() -> None:
    text = text_of(find("copy"), "en")
    assert [str(sublight.learn.hint("copy")) for _ in range(4)] == [text.hint(level) for level in (1, 2, 3, 4)]
    assert Progress().state("copy").hints == 3


def test_the_solution_waits_for_a_pass() -> None:
    with pytest.raises(BadInput, match="anyway=True"):
        sublight.learn.solution("copy")
    assert "Common mistakes" in str(sublight.learn.solution("copy", anyway=True))
    Progress().add(verdict("copy", passed=True), "")
    assert find("copy").solution() in sublight.learn.solution("copy")._repr_markdown_()


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="roadmap"):
        _ = sublight.learn.roadmap
    with pytest.raises(BadInput, match="did you mean softmax"):
        sublight.learn.show("sofmax")
