"""The timed runs' protocol on a CPU, where a graph is the call; benchmarks/learn_solutions.py runs it on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.correct import Error
from sublight.gpus import find as find_gpu
from sublight.learn.exercises import find
from sublight.learn.grade.check import check, order_of
from sublight.learn.grade.crew import Crew
from sublight.learn.grade.timed import Stopwatch
from sublight.learn.grade.timed_fakes import TIMED, TimedCheat
from sublight.learn.record import Goal
from sublight.learn.verdict import Timing

SMALL = replace(find("add"), goal=Goal(shape={"numel": 1100}))


def timed(crew: Crew, source: str) -> tuple[Timing | None, list[str]]:
    gpu = find_gpu("h200")
    with crew.folder() as name:
        watch = Stopwatch(exercise=SMALL, gpu=gpu, order=order_of(SMALL, source, Path(name), gpu), crew=crew,
                          device="cpu", most_sets=3, least_calls=3, runs=1)  # fmt: skip
        try:
            watch.begin()
            found = watch.timing()
        finally:
            watch.close()
        return found, [f"{fault.kind}: {fault.text}" for fault in watch.faults]


def test_a_solution_is_timed(crew: Crew) -> None:
    found, faults = timed(crew, find("add").solution())
    assert faults == [] and found is not None
    assert found.sets == 3 and found.calls >= 3 and 0 < found.seconds < 10


@pytest.mark.parametrize(
    ("ratios", "draws", "kinds"),
    [
        ((1.9,), 3, []),
        ((3.0, 1.0), 6, []),  # bad luck: PyTorch's largest error was small in the first draws
        ((3.0,), 24, ["values"]),  # it stays
        ((101.0,), 3, ["values"]),  # no luck is so bad
    ],
)
def test_bad_luck_is_told_from_an_error(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, ratios: tuple[float, ...], draws: int, kinds: list[str]
) -> None:
    drawn: list[float] = []

    def lucky(name: str, ours: Any, theirs: Any, truth: Any) -> Error:
        """PyTorch's error is 1 / ratio in the draws of each run of three, ours is 1 in all of them."""
        drawn.append(1 / ratios[min(len(drawn) // 3, len(ratios) - 1)])
        return Error(name=name, largest=1.0, squares=1.0, count=1, torch_largest=drawn[-1], torch_squares=1.0)

    monkeypatch.setattr("sublight.learn.grade.timed.error", lucky)
    monkeypatch.setattr("sublight.learn.grade.timed.LEAST_RUN_S", 0.0)
    monkeypatch.setattr("sublight.learn.grade.timed.RUN_S", 0.0)
    monkeypatch.setattr(Stopwatch, "_alone", lambda self, number: None)
    found, faults = timed(crew, find("add").solution())
    assert [fault.split(":")[0] for fault in faults] == kinds and (found is None) == bool(kinds)
    assert len(drawn) == draws


def test_the_output_that_stays_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that had the worst luck in a single draw."""
    exercise = find("flash_attention")
    assert exercise.goal and exercise.outputs == ("out", "log_sum")
    small = dict.fromkeys(exercise.goal.shape, 16)
    inputs = exercise.problem().inputs(small, exercise.goal.dtype, "cpu", 1)
    results = [y + 1 for y in exercise.problem().outputs(inputs)]
    torch_largest = {"out": iter((0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)), "log_sum": iter([0.25] * 8)}

    def lucky(name: str, ours: Any, theirs: Any, truth: Any) -> Error:
        return Error(name=name, largest=1.0, squares=1.0, count=1, torch_largest=next(torch_largest[name]),
                     torch_squares=1.0)  # fmt: skip

    monkeypatch.setattr("sublight.learn.grade.timed.error", lucky)
    watch = Stopwatch(exercise=exercise, gpu=find_gpu("h200"), order={}, crew=None, device="cpu")  # type: ignore[arg-type]
    watch._judge([inputs], [results], again=lambda: ([inputs], [results]))
    assert [fault.text.split("[")[0] for fault in watch.faults] == ["log_sum"]


@pytest.mark.parametrize("cheat", [each for each in TIMED if not each.needs_gpu], ids=lambda cheat: cheat.name)
def test_cheats_are_refused(crew: Crew, cheat: TimedCheat) -> None:
    found, faults = timed(crew, cheat.source)
    assert found is None and any(fault.startswith(cheat.kinds) and cheat.word in fault for fault in faults), faults


@pytest.mark.parametrize(("fraction", "kinds"), [(1e-9, []), (1e-3, ["goal"])])
def test_a_check_is_timed_and_held_to_its_goal(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, fraction: float, kinds: list[str]
) -> None:
    monkeypatch.setattr(Crew, "timer", lambda self, gpu: self)
    on_cpu = partial(Stopwatch, device="cpu", most_sets=2, least_calls=2, runs=1)
    monkeypatch.setattr("sublight.learn.grade.timed.Stopwatch", on_cpu)
    small = replace(SMALL, goal=Goal(shape={"numel": 1100}, fraction=fraction))
    verdict = check(small, find("add").solution(), crew=crew, gpu=find_gpu("h200"))
    assert [fault.kind for fault in verdict.faults] == kinds, str(verdict)
    assert verdict.timing and verdict.timing.case == "numel = 1100, float32"
    assert ("reaches" in verdict.sentence) == (not kinds) and verdict.to_json()["timed"]["sets"] == 2
