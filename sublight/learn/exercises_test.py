"""Every exercise is whole: texts in their languages, hints that are true of the code, needs that come before."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from pathlib import Path

import pytest

from sublight import gpus
from sublight.errors import BadInput
from sublight.learn.exercises import CHAPTERS, CUDA_EXERCISES, EXERCISES, find
from sublight.learn.grade.goal import floor_s
from sublight.learn.grade.scan import scan
from sublight.learn.record import EXERCISES_FOLDER, Exercise
from sublight.learn.texts import HINTS, LANGUAGES, SECTIONS, Text, parse

CODE = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CHINESE = re.compile(r"[\u4e00-\u9fff]")
LEFT_IN_ENGLISH = re.compile(r"(?:\b[A-Za-z]+,? ){5}")  # five words in a row
LARGE = {"million million": 10**12, "million": 10**6, "billion": 10**9, "万亿": 10**12, "万": 10**4, "亿": 10**8}
FIGURE = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?) ?({'|'.join(LARGE)})?")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
TEXTS = [
    *(
        pytest.param(exercise, exercise.folder / f"{language}.md", id=f"{exercise.name}-{language}")
        for exercise in EXERCISES
        for language in LANGUAGES
    ),
    *(pytest.param(each, each.folder / "cuda.en.md", id=f"{each.name}-en") for each in CUDA_EXERCISES),
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
    drawn = [
        line for section in text.sections.values() for block in FENCED.findall(section) for line in block.split("\n")
    ]
    assert [line for line in drawn if columns(line) > 78] == []  # a terminal of 80 would break it


def columns(words: str) -> int:
    """That a terminal takes for them: a Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in words)


@pytest.mark.parametrize("exercise", [each for each in EXERCISES if each.goal], ids=lambda each: each.name)
def test_the_least_time_that_a_page_names_is_the_floor(exercise: Exercise) -> None:
    assert exercise.goal
    why = texts_of(exercise)[0].sections["why"]
    floor_us = 1e6 * floor_s(gpus.find("h200"), exercise.least_cost(exercise.goal.shape, exercise.goal.dtype))
    assert [each for each in re.findall(r"(\d+) µs on an H200", why) if int(each) != round(floor_us)] == []


def test_a_hint_that_is_not_true_is_found() -> None:
    exercise = find("copy")
    words = (exercise.folder / "en.md").read_text(encoding="utf-8").replace("`mask = place < n`", "`mask = place <= n`")
    assert untrue(parse(words, "en"), exercise) == ["mask = place <= n"]


def figures(words: str) -> set[Decimal]:
    """The numbers of a text outside of its code, by value.

    >>> sorted(map(int, figures("2 · 4.3 billion reads, `BLOCK = 64`"))) == sorted(map(int, figures("读 2 · 43 亿次")))
    True
    """
    found = FIGURE.findall(CODE.sub("", FENCED.sub("", words)))
    return {(Decimal(digits.replace(",", "")) * LARGE.get(scale, 1)).normalize() for digits, scale in found}


def apart(english: str, chinese: str) -> list[str]:
    """What two languages of one section do not have in common: paragraphs, list items, code, figures."""
    both = (english, chinese)
    faults = [
        f"{name}: {sizes}"
        for name, sizes in (
            ("paragraphs", [len(words.split("\n\n")) for words in both]),
            ("list items", [len(re.findall("^- ", words, re.MULTILINE)) for words in both]),
            ("lines of code", [[block.count("\n") for block in FENCED.findall(words)] for words in both]),
        )
        if sizes[0] != sizes[1]
    ]
    pieces = [set(CODE.findall(FENCED.sub("", words))) for words in both]
    faults += [f"code: {piece}" for piece in sorted(pieces[0] ^ pieces[1])]
    lines = [[line for block in FENCED.findall(words) for line in block.splitlines()] for words in both]
    faults += [f"code: {line}" for line in lines[1] if line not in lines[0] and not CHINESE.search(line)]
    in_words = {Decimal(n) for n, word in enumerate(NUMBERS) if re.search(rf"\b{word}\b", english.lower())}
    faults += [f"figure: {figure}" for figure in sorted(figures(english) - figures(chinese))]
    faults += [f"figure: {figure}" for figure in sorted(figures(chinese) - figures(english) - in_words)]
    prose = re.sub(r'"[^"\n]*"', "", CODE.sub("", FENCED.sub("", chinese)))  # what a check says is quoted as it is
    faults += [f"not translated: {words}" for words in LEFT_IN_ENGLISH.findall(prose)]
    if re.search("[A-Za-z]{3}", prose) and not CHINESE.search(prose):
        faults.append("no word of Chinese")
    return faults


def texts_of(exercise: Exercise) -> list[Text]:
    return [parse((exercise.folder / f"{each}.md").read_text(encoding="utf-8"), each) for each in ("en", "zh")]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda each: each.name)
def test_both_languages_say_the_same(exercise: Exercise) -> None:
    english, chinese = texts_of(exercise)
    faults = {key: apart(english.sections[key], chinese.sections[key]) for key in SECTIONS}
    assert {key: found for key, found in faults.items() if found} == {}


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("32 µs", "31 µs", ["figure: 32", "figure: 31"]),
        ("有四处", "有 4 处", []),  # four, in words
        ("`place` 是向量", "place 是向量", ["code: place"]),
        ("program:       0", "program:       7", ["code: program:       7            1             2"]),
        ("\n- 忘了 `program * BLOCK`：", "", ["list items: [4, 3]", "code: program * BLOCK"]),
    ],
)
def test_a_difference_between_languages_is_found(right: str, wrong: str, fault: list[str]) -> None:
    english, chinese = texts_of(find("copy"))
    changed = {key: words.replace(right, wrong) for key, words in chinese.sections.items()}
    assert changed != chinese.sections
    faults = [each for key, words in changed.items() for each in apart(english.sections[key], words)]
    assert faults == fault
    assert apart(english.sections["why"], english.sections["why"])  # a file that is only a copy


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
