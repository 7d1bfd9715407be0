"""What is wrong is said by index, value and place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sublight.correct import error
from sublight.learn.grade.judge import fault_of


def fault(ours, theirs):  # type: ignore[no-untyped-def]
    truth = theirs.double()
    return fault_of("out", ours, theirs, truth, error("out", ours, theirs, truth), "n = 10")


def test_elements_that_were_never_written() -> None:
    theirs = torch.arange(10.0)
    ours = theirs.clone()
    ours.view(torch.int32)[6:] = -1  # the poison
    found = fault(ours, theirs)
    assert found.kind == "unwritten"
    assert found.text == "out[6] was never written, expected 6; wrong are 4 of 10 elements: out[6] to the last"


def test_an_output_that_nobody_wrote() -> None:
    theirs = torch.arange(10.0)
    ours = theirs.clone()
    ours.view(torch.int32)[:] = -1
    assert fault(ours, theirs).text == "out[0] was never written, expected 0; nor was any other"


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (torch.linspace(0.1, 1, 50).half().float(), torch.linspace(0.1, 1, 50), "only the bits of float16"),
        (torch.linspace(0.1, 1, 50).bfloat16().float(), torch.linspace(0.1, 1, 50), "only the bits of bfloat16"),
        (torch.full((50,), 1.0156).bfloat16(), torch.ones(50).bfloat16(), "That is close: compute in float32"),
        (torch.full((50,), float("nan")), torch.ones(50), "nan comes of inf - inf"),
        (torch.linspace(0.1, 1, 50).half().float() * 2, torch.linspace(0.1, 1, 50), ""),
        (torch.zeros(50), torch.linspace(0.1, 1, 50), ""),
        (torch.full((50,), 3.0).bfloat16(), torch.ones(50).bfloat16(), ""),
    ],
)  # fmt: skip
def test_a_cause_that_the_numbers_show(ours: torch.Tensor, theirs: torch.Tensor, words: str) -> None:
    found = fault(ours, theirs).text
    assert words in found if words else found.endswith(("all others are wrong, too", "to the last"))


def test_a_nan_that_a_kernel_wrote_is_a_value() -> None:
    theirs = torch.arange(4.0).bfloat16()
    ours = theirs.clone()
    ours[2] = float("nan")
    found = fault(ours, theirs)
    assert found.kind == "values" and found.text.startswith("out[2] is nan, expected 2")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((slice(None), slice(7, None)), "out[0, 7] is 9, expected 1; wrong are 12 of 40 elements: columns 7 to 9"),
        ((3, slice(None)), "out[3, 0] is 9, expected 1; wrong are 10 of 40 elements: row 3"),
        ((2, 5), "out[2, 5] is 9, expected 1; it is the only wrong one of 40 elements"),
        ((slice(None), slice(None)), "out[0, 0] is 9, expected 1; all others are wrong, too"),
    ],
)
def test_where_wrong_values_lie(wrong: tuple[int | slice, ...], words: str) -> None:
    theirs = torch.ones(4, 10)
    ours = theirs.clone()
    ours[wrong] = 9
    assert fault(ours, theirs).text == words


def test_numbers_that_are_whole() -> None:
    assert fault(torch.tensor([1, 5]), torch.tensor([1, 2])).text.startswith("out[1] is 5, expected 2")
