"""The timer warms up, times a window and ends there; a script that ends early gives what there is."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from sublight.fix.cure.timer import LEAST, MOST, WARMUP, StepTimer


def train(timer: StepTimer, steps: int, step_s: float = 0.0) -> int:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(steps):
        if timer._phase == "done":
            return number
        net(torch.ones(1, 2)).sum().backward()
        time.sleep(step_s)
        optimizer.step()
    return steps


def test_a_window_of_steps() -> None:
    done: list[int] = []
    timer = StepTimer(lambda: done.append(1))
    timer.start()
    ran = train(timer, 200, 0.02)
    timer.finish()
    assert done == [1] and timer.steps_from == "optimizer steps"
    assert LEAST <= timer.steps <= MOST and ran == 2 + WARMUP + timer.steps
    assert timer.step_s == pytest.approx(0.022, rel=0.5)


def test_a_script_that_ends_in_the_window_and_one_that_ends_before() -> None:
    timer = StepTimer(lambda: None)
    timer.start()
    train(timer, 2 + WARMUP + 4)
    timer.finish()
    assert timer.steps == 4 and timer.step_s is not None
    early = StepTimer(lambda: None)
    early.start()
    train(early, 5)
    early.finish()
    assert early.step_s is None and early.seen == 3


def test_a_host_that_runs_ahead_does_not_hide_a_saving() -> None:
    """As it does on a GPU: a step launched at once, then one that waits for two."""
    timer = StepTimer(lambda: None)
    lengths = [0.001, 0.039] * 20
    timer._times_s = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    timer._end(timer._times_s[-1])
    assert timer.step_s == pytest.approx(0.020)
    assert 0.001 < timer.spread_s < 0.25 * timer.step_s
