"""Where steps begin and end: by the profiler, an optimizer, a repeated range, or the outermost module."""

from __future__ import annotations

import pytest

from sublight.report.explain.trace_fakes import BACKWARD, COMPUTE, MAIN, Tape
from sublight.trace import steps
from sublight.trace.record import Kind, Trace
from sublight.trace.steps import Steps

MS = 1_000_000


def found(*events: tuple[Kind, str, int, int, int]) -> Steps:
    tape = Tape()
    for event in events:
        tape.add(*event)
    return steps.find(tape.trace(None))


def ranges(name: str, *spans: tuple[int, int], lane: int = MAIN) -> list[tuple[Kind, str, int, int, int]]:
    """Spans in milliseconds; a # in the name counts them."""
    return [
        (Kind.RANGE, name.replace("#", f"#{at}"), lane, start * MS, end * MS) for at, (start, end) in enumerate(spans)
    ]


def test_the_profilers_steps_come_first() -> None:
    optimizer = ranges("Optimizer.step#SGD.step", (8, 9), (18, 19), (28, 29))
    got = found(*ranges("ProfilerStep#", (0, 9), (10, 20)), *optimizer)
    assert got == Steps(spans_ns=((0, 9 * MS), (10 * MS, 20 * MS)), found_by="ProfilerStep ranges")
    assert found(*ranges("ProfilerStep#", (3, 9))).spans_ns == ((3 * MS, 9 * MS),)


def test_the_thread_with_most_steps_is_meant() -> None:
    got = found(
        *ranges("ProfilerStep#", (0, 9), (10, 20)), *ranges("ProfilerStep#", (1, 5), (5, 9), (9, 13), lane=BACKWARD)
    )
    assert got.count == 3


def test_optimizer_steps_end_steps() -> None:
    got = found(*ranges("Optimizer.step#SGD.step", (8, 10), (18, 20), (28, 30)))
    assert got == Steps(spans_ns=((10 * MS, 20 * MS), (20 * MS, 30 * MS)), found_by="optimizer steps")


def test_of_two_optimizers_that_step_in_turn_one_counts() -> None:
    first = ranges("Optimizer.step#Adam.step", (3, 4), (13, 14), (23, 24))
    got = found(*first, *ranges("Optimizer.step#SGD.step", (8, 10), (18, 20), (28, 30)))
    assert got.spans_ns == ((4 * MS, 14 * MS), (14 * MS, 24 * MS))


def test_a_range_that_the_user_repeats() -> None:
    inner = ranges("loss", (1, 2), (11, 12), (21, 22))
    got = found(*ranges("iteration #", (0, 9), (10, 19), (20, 29)), *inner)
    assert got.spans_ns == ((0, 10 * MS), (10 * MS, 20 * MS), (20 * MS, 29 * MS))
    assert got.found_by == "a repeated range"


@pytest.mark.parametrize("name", ["nccl:all_reduce", "Optimizer.zero_grad#", "DistributedDataParallel.forward"])
def test_a_library_range_is_no_step(name: str) -> None:
    assert found(*ranges(name, (0, 9), (10, 19), (20, 29))).found_by.startswith("the whole trace")


def test_a_range_that_covers_little_is_no_step() -> None:
    assert found(*ranges("step", (0, 1), (10, 11), (20, 21))).found_by.startswith("the whole trace")


def calls(*spans: tuple[str, int, int]) -> list[tuple[Kind, str, int, int, int]]:
    return [(Kind.PYTHON, f"nn.Module: {name}", MAIN, start * MS, end * MS) for name, start, end in spans]


def test_calls_of_the_outermost_module() -> None:
    got = found(*calls(("Net_0", 0, 8), ("Linear_0", 1, 2), ("Net_0", 10, 18), ("Linear_0", 11, 12)))
    assert got.spans_ns == ((0, 10 * MS), (10 * MS, 18 * MS))
    assert got.found_by == "calls of the outermost module"
    three = found(*calls(("Net_0", 0, 8), ("Net_0", 10, 18), ("Net_0", 20, 21)))
    assert three.spans_ns == ((0, 10 * MS), (10 * MS, 20 * MS))
    assert found(*calls(("A_0", 0, 8), ("B_0", 10, 18))).found_by.startswith("the whole trace")


def kernels(*starts: float) -> list[tuple[Kind, str, int, int, int]]:
    return [(Kind.KERNEL, "k", COMPUTE, int(start * MS), int(start * MS) + 100_000) for start in starts]


def test_idle_gaps_of_the_device() -> None:
    got = found(*kernels(0, 0.2, 0.4, 5, 5.2, 5.4, 10, 10.2, 10.4))
    assert got.spans_ns == ((0, 5 * MS), (5 * MS, 10 * MS))  # how long the device idles after the last is not known
    assert got.skipped == 0
    assert got.found_by == "idle gaps of the device"
    assert found(*kernels(0, 0.2, 5, 5.2, 5.4, 5.6)).count == 1  # bursts that differ are no steps


def test_at_worst_the_whole_trace_is_a_step() -> None:
    got = found((Kind.OP, "aten::mm", MAIN, 2 * MS, 5 * MS), *kernels(1, 6))
    assert got.spans_ns == ((2 * MS, 5 * MS),)
    assert found(*kernels(0, 0.2)).spans_ns == ((0, 300_000),)
    assert found((Kind.OP, "aten::mm", MAIN, 7, 7)).spans_ns == ((7, 8),)


def test_nothing_gives_a_step_of_a_nanosecond() -> None:
    empty: Trace = Tape().trace(None)
    assert steps.find(empty).spans_ns == ((0, 1),)


@pytest.mark.parametrize(("first", "skipped"), [(25, 1), (11, 0)])
def test_a_slow_first_step_is_warm_up(first: int, skipped: int) -> None:
    got = found(*ranges("ProfilerStep#", (0, first), (30, 40), (40, 50), (50, 60)))
    assert (got.skipped, got.count) == (skipped, 4 - skipped)
    assert found(*ranges("ProfilerStep#", (0, 25), (30, 40))).skipped == 0  # of two, nobody knows which is usual


def test_steps_do_not_overlap() -> None:
    got = found(*ranges("ProfilerStep#", (0, 10), (5, 12), (10, 20), (20, 20)))
    assert got.spans_ns == ((0, 10 * MS), (10 * MS, 20 * MS))
