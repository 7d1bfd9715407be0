"""Steps on paper: what comes back is written where it fits, and what does not fit is named; torch is not for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sublight.learn.exercises import EXERCISES, find
from sublight.learn.grade.answers import wrong_answers
from sublight.learn.grade.paper import computed
from sublight.learn.grade.scan import ON_PAPER, scan

NAMES = ("rows", "total")


def called(function: Callable[..., Any]) -> tuple[Any, list[Any]]:
    outputs = [torch.full((2, 2), float("nan")), torch.full((), float("nan"))]
    given = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    failure = computed(function, ([given], outputs), NAMES, "paper.py")["failure"]
    return failure, outputs


def test_numbers_come_in_as_lists_and_go_out_as_tensors() -> None:
    failure, outputs = called(lambda x: ([[2 * v for v in row] for row in x], sum(map(sum, x))))
    assert failure is None
    assert outputs[0].tolist() == [[2, 4], [6, 8]] and outputs[1].item() == 10


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x, "a list of 2 numbers was returned: `return rows, total`"),  # two rows are not two results
        (lambda x: (x, 1, 2), "it must return 2 results: `return rows, total`"),
        (lambda x: None, "it must return 2 results"),
        (lambda x: (x, [1]), "total must be one number, and a list of 1 numbers was returned"),
        (lambda x: ([1, 2], 1), "rows must be a list of 2 lists of 2 numbers, and a list of 2 numbers was returned"),
        (lambda x: (x, "ten"), "total must be one number, and a str was returned"),
        (lambda x: (x, None), "total must be one number, and nothing was returned"),
        (lambda x: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_what_does_not_fit_is_named(function: Callable[..., Any], reason: str) -> None:
    failure, _ = called(function)
    assert failure and reason in failure["text"]


def test_torch_does_no_paper_work() -> None:
    [fault] = scan("import torch\n\ndef strides(sizes, index):\n    return 1\n", "strides", ON_PAPER)
    assert fault.kind == "scan" and "a step on paper imports math alone" in fault.text
    [fault] = scan("def strides(sizes, index):\n    return sizes.norm()\n", "strides", ON_PAPER)
    assert fault.text == "`.norm` is not for a submission: a step on paper is plain Python: numbers, lists and math"
    lists = "def strides(sizes, index):\n    own = sizes.copy()\n    own.insert(0, own.pop())\n    return own\n"
    assert scan(lists, "strides", ON_PAPER) == []
    for exercise in EXERCISES:
        if exercise.kind == "paper":
            assert scan(exercise.solution(), exercise.name, ON_PAPER) == []


def test_answers_beside_the_code() -> None:
    exercise = find("read_xray")
    assert wrong_answers(exercise, exercise.solution()) == []
    assert [fault.line for fault in wrong_answers(exercise, exercise.starter())] == [7, 8]
    texts = [fault.text for fault in wrong_answers(exercise, 'WORST = "x"\n')]
    assert "WORST = 'x' is not what it is" in texts[0] and "SECTORS is missing" in texts[1]
