"""What a bound says of a goal: reached, missed, too good, or unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublight.learn.grade.goal import held_to_goal
from sublight.learn.verdict import Fault, KernelFigures, Verdict


def kernel(seconds: float, unfollowed: str = "", spill_bytes: int = 0, uncounted: str = "") -> KernelFigures:
    known = {"registers": 32, "sectors": 1, "ideal_sectors": 1, "programs": 1}
    words = {"name": "k", "limited_by": "", "sentence": "held back", "unfollowed": unfollowed, "uncounted": uncounted}
    return KernelFigures(**known, **words, spill_bytes=spill_bytes, occupancy=1.0, seconds=seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("figures", "is_by_data", "words"),
    [
        (kernel(1.05), False, ""),
        (kernel(2.0), False, "allows 0.50 of the h200's limit, the goal is 0.9"),
        (kernel(0.5), False, "leaves out some work"),
        (kernel(0.001, "it was still running after 9 instructions"), False, "cannot be told: it was still running"),
        (kernel(1.05, "an address came from memory"), False, "cannot be told: an address came from memory"),
        (kernel(1.05, "an address came from memory"), True, ""),  # real numbers stood there: the bound holds
        (kernel(0.5, uncounted="TMA moves whole tiles"), False, ""),  # its copies take time that no one could count
        (kernel(1.05, spill_bytes=8), False, "spills 8 bytes"),
    ],
)
def test_a_bound_is_held_to_its_goal(figures: KernelFigures, is_by_data: bool, words: str) -> None:
    verdict = Verdict(exercise="add", file="add.py", faults=(), gpu="h200", source="", goal_case="n", goal_fraction=0.9,
                      floor_s=1.0, kernels=(figures,), is_by_data=is_by_data)  # fmt: skip
    faults = held_to_goal(verdict)
    assert (words in faults[0].text) if words else faults == []


@pytest.mark.parametrize(
    ("sentence", "programs", "words"),
    [
        ("nothing but device memory holds it back: 2 s at best", 100, "That is memory traffic, 2 times as long"),
        ("waiting for memory holds it back: 2 s at best", 10_000, "each of 10,000 programs has 100 bytes: start fewer"),
        ("waiting for memory holds it back: 2 s at best", 16, ""),
        ("waiting for memory holds it back: 2 s at best", 0, ""),  # a grid of none
    ],
)
def test_what_follows_from_the_figures(sentence: str, programs: int, words: str) -> None:
    figures = replace(kernel(2.0), sentence=sentence, programs=programs)
    [fault] = held_to_goal(Verdict(exercise="add", file="add.py", faults=(), gpu="h200", source="", goal_case="n",
                                   goal_fraction=0.9, floor_s=1.0, least_bytes=10**6, kernels=(figures,)))  # fmt: skip
    assert words in fault.text if words else fault.text.endswith("at best")


def test_code_that_is_wrong_or_not_known_has_no_fraction() -> None:
    """Nor does it count on the roadmap: one turn of an endless loop looks fast."""
    known = {"exercise": "copy", "file": "copy.py", "gpu": "h200", "floor_s": 1.0}
    unknown = Verdict(**known, faults=(), kernels=(kernel(0.001, "it was still running"),))  # type: ignore[arg-type]
    wrong = Fault(kind="launch", text="leaves out some work")
    fast = Verdict(**known, faults=(wrong,), kernels=(kernel(0.5),))  # type: ignore[arg-type]
    assert unknown.fraction is unknown.predicted_s is fast.fraction is None
    assert Verdict(**known, faults=(), kernels=(kernel(0.5),)).fraction == 2.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "launches", "words"),
    [
        (300.0, 1, "allows 0.003 of the h200's limit, the goal is 0.9: k: held back"),
        (1.0, 2, "allows 0.50 of the h200's limit, the goal is 0.9: 2 launches one after the other, the slowest: k: "),
    ],
)
def test_a_missed_goal_in_words(times: float, launches: int, words: str) -> None:
    verdict = Verdict(exercise="add", file="add.py", faults=(), gpu="h200", source="", goal_case="n", goal_fraction=0.9,
                      floor_s=1.0, kernels=(kernel(times),) * launches)  # fmt: skip
    assert words in held_to_goal(verdict)[0].text
