"""What a line of the user's does: torch's own Python is not theirs, and a wait on a line that prints is a wait."""

from __future__ import annotations

import pytest

from sublight.diagnose import fakes, python, python_advice
from sublight.diagnose.python_test import SCRIPT, here, named_and_left, samples, trace

__all__ = ["here"]  # a fixture that each test here uses


def test_torchs_own_python_is_not_saved_with_the_users_of_the_same_function() -> None:
    """30 looks at a loop over rows, 20 at the optimizer's step, both in the script's own body."""
    rows, step = (line_of(text) for text in ("n + 1", "optimizer.step"))
    title, left = named_and_left(
        ([("train.py", "<module>", rows, 1)], 30),
        ([("train.py", "<module>", step, 1), ("torch/optim/adam.py", "Adam.step", 1, 1)], 20),
    )
    assert title == f"train.py:{rows} goes over elements one by one in Python: 3.00 ms of each step"
    assert left == pytest.approx(0.4)


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


def test_what_waits_on_a_line_that_also_prints_waits() -> None:
    data = samples(
        ([("train.py", "<module>", line_of("print("), 1), ("selectors.py", "EpollSelector.select", 1, 1)], 30)
    )
    (spot,) = python.spots(fakes.case(trace(data)))
    assert python_advice.kind_of(spot, trace(data)) == python_advice.WAIT
