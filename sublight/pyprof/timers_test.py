"""Clocks on a clock that is made up, and the mistakes as they come out here."""

from __future__ import annotations

import itertools
import json

from rich.console import Console

from sublight.pyprof import timers
from sublight.report.pyprof import timers as report


def test_a_reading_costs_what_the_wall_clock_says() -> None:
    """Each reading of this clock takes 3 s of its wall's time."""
    wall = itertools.count(0.0, 0.0)
    passed = [0.0]

    def clock() -> float:
        passed[0] += 3.0
        return passed[0]

    assert timers.cost_s(clock, wall=lambda: next(wall) + passed[0]) == 3.0


def test_a_clock_that_stands_still_has_no_step() -> None:
    assert timers.step_s(lambda: 5.0) is None
    back = itertools.cycle([5.0, 4.0, 4.5])
    assert timers.step_s(lambda: next(back)) == 0.5, "a step back is none"


def test_the_mistakes_are_mistakes_here_too() -> None:
    """Whatever the machine does: CPU clocks miss a sleep, a thread's clock misses another's work."""
    slept = timers.slept()
    assert slept.wrong_s is not None and slept.right_s is not None
    assert slept.wrong_s < 0.5 * timers.SLEEP_S <= timers.SLEEP_S <= slept.right_s
    others = timers.other_threads()
    assert others.wrong_s is not None and others.right_s is not None and others.wrong_s < 0.5 * others.right_s


def test_without_a_gpu_the_rest_is_there_and_the_reason_too(monkeypatch: object) -> None:
    monkeypatch.setattr(timers.nvml, "health", lambda: None)  # type: ignore[attr-defined]
    found = timers.clocks()
    assert [timer.reason for timer in found.timers if timer.cost_s is None] == [timers.NO_GPU] * 2
    assert [mistake.reason for mistake in found.mistakes if mistake.right_s is None] == [timers.NO_GPU]
    assert all(0 < timer.cost_s < 1e-3 and 0 < timer.step_s < 1 for timer in found.timers if timer.cost_s is not None)
    assert json.loads(json.dumps(found.to_json()))["timers"][0]["name"] == "time.perf_counter"
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.page(found))
    words = console.export_text()
    assert max(map(len, words.splitlines())) <= 80 and "time.process_time" in words and timers.NO_GPU in words
