"""Every exercise is whole: texts in their languages, hints that are true of the code, needs that come before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sublight.errors import BadInput
from sublight.learn.exercises import CHAPTERS, CUDA_EXERCISES, EXERCISES, find
from sublight.learn.grade.scan import scan
from sublight.learn.record import EXERCISES_FOLDER, Exercise
from sublight.learn.texts import HINTS, SECTIONS, Text, parse

CODE = re.compile(r"`([^`\n]+)`")
TEXTS = [
    pytest.param(exercise, file, id=f"{exercise.name}-{file.stem}")
    for exercise in (*EXERCISES, *CUDA_EXERCISES)
    for file in sorted(exercise.folder.glob("*.md"))
    if file.name.startswith("cuda.") == (exercise.kind == "cuda")
]


def plain(code: str) -> str:
    """Without what formatting changes."""
    return re.sub(r"\s+", "", code)


def untrue(text: Text, exercise: Exercise) -> list[str]:
    """Code in the hints that the solution does not contain, nor, of single names, the starter."""
    starter = set(re.findall(r"\w+", exercise.starter()))
    comment = "//" if exercise.kind == "cuda" else "#"
    solution = plain(re.sub(rf"{comment}.*", "", exercise.solution()))
    hints = "\n".join(text.sections[f"hint {level}"] for level in range(1, HINTS + 1))
    return [
        code
        for code in CODE.findall(hints)
        if code not in starter and plain(re.sub(rf"{comment}.*", "", code)) not in solution
    ]


@pytest.mark.parametrize(("exercise", "file"), TEXTS)
def test_texts_are_whole_and_hints_are_true(exercise: Exercise, file: Path) -> None:
    text = parse(file.read_text(encoding="utf-8"), file.stem)
    assert tuple(text.sections) == SECTIONS and all(text.sections.values()) and all(text.headings.values())
    assert text.title and len(text.title) < 60
    assert untrue(text, exercise) == []
    assert f"learn/{exercise.file}" in text.sections["task"]
    assert (exercise.goal is None) == (exercise.kind == "paper")
    if exercise.goal:
        assert f"{exercise.goal.fraction:g}" in text.sections["task"]
        for size in exercise.goal.shape.values():
            assert f"{size:,}" in text.sections["task"] or str(size) in text.sections["task"]
    for name, right in exercise.answers.items():
        assert f"`{name}`" in text.sections["task"]
        assert isinstance(right, int) or f'"{right}"' in text.sections["task"]
    assert f"`{exercise.signature}`" in text.page


def test_a_hint_that_is_not_true_is_found() -> None:
    exercise = find("copy")
    words = (exercise.folder / "en.md").read_text(encoding="utf-8").replace("`mask = place < n`", "`mask = place <= n`")
    assert untrue(parse(words, "en"), exercise) == ["mask = place <= n"]


def test_languages() -> None:
    for exercise in EXERCISES:
        assert (exercise.folder / "en.md").exists()
        if exercise.chapter in ("first", "rows"):
            assert (exercise.folder / "zh.md").exists()


@pytest.mark.parametrize("name", [each.name for each in EXERCISES if each.apart])
def test_entries_that_stand_apart(name: str) -> None:
    """What is right for some of them is the same without the others, up to rounding: the grader counts on it."""
    torch = pytest.importorskip("torch")
    exercise = find(name)
    problem = exercise.problem()
    made = problem.inputs(exercise.shown, exercise.dtypes[0], "cpu", 1)
    wide = tuple(x.double() if x.is_floating_point() else x for x in made)
    results = problem.outputs(wide)
    rows = torch.arange(0, results[0].shape[0], 2)
    part = tuple(x[rows] if n in exercise.apart else x for n, x in zip(exercise.arguments, wide, strict=True))
    for all_of_them, some in zip(results, problem.outputs(part), strict=True):
        torch.testing.assert_close(some, all_of_them[rows])


def test_names_folders_and_needs() -> None:
    folders = {path.parent.name for path in EXERCISES_FOLDER.glob("*/*/solution.py")}
    assert {exercise.name for exercise in EXERCISES} == folders
    for place, exercise in enumerate(EXERCISES):
        assert exercise.chapter in CHAPTERS
        assert set(exercise.needs) <= {each.name for each in EXERCISES[:place]}
        assert (
            set(exercise.shown) == set(exercise.sizes) == set(exercise.goal.shape if exercise.goal else exercise.sizes)
        )
        assert f"def {exercise.name}(" in exercise.starter() and "TODO" in exercise.starter()
        assert "TODO" not in exercise.solution() and scan(exercise.solution(), exercise.name) == []


def test_the_commands_that_texts_name_exist() -> None:
    from sublight.cli.learn import COMMANDS

    for exercise in EXERCISES:
        for file in exercise.folder.glob("*.md"):
            words = re.findall(r"sublight learn ([a-z]+)", file.read_text(encoding="utf-8"))
            assert set(words) <= set(COMMANDS), file


def test_a_name_that_is_unknown() -> None:
    with pytest.raises(BadInput, match="did you mean softmax"):
        find("sofmax")
