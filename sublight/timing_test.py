"""The stopping rule, what is divided by what, and that what ran is what is named; a clock that only calls advance."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from sublight import timing
from sublight.timing import call_seconds, collect, measure, sets_for

LIMIT_S = 0.5


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def passing(self, seconds: float) -> Callable[[], None]:
        """A call that takes so long."""

        def call() -> None:
            self.now += seconds

        return call

    def sampling(self, samples: Iterator[float]) -> Callable[[], float]:
        """A sample that takes as long as it says."""

        def sample() -> float:
            seconds = next(samples)
            self.now += seconds
            return seconds

        return sample


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


# ------------------------------------------------------------------------------------------------ when to stop


def test_constant_samples_settle_at_once(clock: Clock) -> None:
    assert collect(clock.sampling(itertools.repeat(1e-3)), LIMIT_S) == [1e-3] * timing.MIN_SAMPLES


def test_noise_takes_as_many_samples_as_its_mean_needs(clock: Clock) -> None:
    times_s = collect(clock.sampling(itertools.cycle((0.95e-3, 1.05e-3))), LIMIT_S)
    needed = (0.05 / timing.RELATIVE_ERROR) ** 2  # the standard error falls with the root of the count
    assert len(times_s) == pytest.approx(needed, rel=0.05)


def test_noise_that_does_not_settle_stops_at_the_time_limit(clock: Clock) -> None:
    times_s = collect(clock.sampling(itertools.cycle((1e-3, 9e-3))), LIMIT_S)
    assert len(times_s) == pytest.approx(LIMIT_S / 5e-3, abs=2)
    assert LIMIT_S < clock.now <= LIMIT_S + 9e-3


def test_three_samples_are_taken_however_long(clock: Clock) -> None:
    assert collect(clock.sampling(itertools.count(10.0)), LIMIT_S) == [10.0, 11.0, 12.0]


def test_samples_that_cost_no_time_end_too() -> None:
    noise = itertools.cycle((1.0, 9.0))
    assert len(collect(lambda: next(noise), 60.0)) == timing.MAX_SAMPLES


# ------------------------------------------------------------------------------------------------ on the CPU


def test_the_time_is_that_of_one_call(clock: Clock) -> None:
    samples = measure(clock.passing(3e-6), device="cpu", time_limit_s=LIMIT_S)
    assert samples.method == "wall"
    assert samples.median_s == pytest.approx(3e-6)
    assert samples.n == timing.MIN_SAMPLES


def test_buffer_sets_are_taken_in_turn_and_averaged(clock: Clock) -> None:
    seen: list[int] = []

    def call(index: int, pass_time: Callable[[], None]) -> Callable[[], None]:
        return lambda: (seen.append(index), pass_time())[1]

    calls = [call(index, clock.passing(seconds)) for index, seconds in enumerate((1e-6, 2e-6, 6e-6))]
    samples = measure(calls, device="cpu", time_limit_s=LIMIT_S)
    assert samples.median_s == pytest.approx(3e-6)
    assert seen[-999:] == [0, 1, 2] * 333


@pytest.mark.alone
def test_a_sleep_takes_as_long_as_it_sleeps() -> None:
    slept_s = []

    def sleep() -> None:
        began_s = time.perf_counter()
        time.sleep(0.01)
        slept_s.append(time.perf_counter() - began_s)  # longer on a busy machine

    samples = measure(sleep, device="cpu", time_limit_s=0.2)
    assert samples.median_s >= 0.01 and samples.median_s == pytest.approx(statistics.median(slept_s), rel=0.2)


def test_call_seconds_is_that_of_one_call(clock: Clock) -> None:
    assert call_seconds(clock.passing(5e-6), device="cpu") == pytest.approx(5e-6)
    assert call_seconds(clock.passing(1.0), device="cpu") == pytest.approx(1.0)


def test_call_seconds_does_not_count_the_first_calls(clock: Clock) -> None:
    """They compile, allocate and fill caches."""
    durations = itertools.chain((10.0,) * 3, itertools.repeat(1e-6))

    def call() -> None:
        clock.now += next(durations)

    assert call_seconds(call, device="cpu") == pytest.approx(1e-6)


def test_a_host_that_slows_down_slows_all_calls_that_take_turns(clock: Clock) -> None:
    """One after the other, the second call would look three times as dear as the first."""

    def call() -> None:
        clock.now += 1e-5 if clock.now < 0.04 else 3e-5

    first, second = timing.calls_in_turns([call, call], device="cpu", time_limit_s=0.05)
    assert first == pytest.approx(second)


def test_each_of_the_calls_in_turns_has_its_own_time(clock: Clock) -> None:
    calls = [clock.passing(seconds) for seconds in (5e-6, 1.0, 2e-5)]
    assert timing.calls_in_turns(calls, device="cpu") == pytest.approx([5e-6, 1.0, 2e-5])
    assert timing.calls_in_turns([], device="cpu") == []


def test_what_ran_is_named() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(64, 64)
    assert timing.kernels_of(lambda: x + x, device="cpu") == ("aten::add",)
    assert timing.kernels_of(lambda: torch.softmax(x, -1), device="cpu") == ("aten::_softmax",)
    several = timing.kernels_of(lambda: torch.softmax((x * 2).view(-1), 0), device="cpu")
    assert several == ("aten::mul", "aten::_softmax"), "a view does no work"


def test_what_is_made_on_first_use_is_not_named() -> None:
    torch = pytest.importorskip("torch")
    made: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        if not made:
            made.append(torch.ones(3) * 2)
        return made[0] + 1

    assert timing.kernels_of(call, device="cpu") == ("aten::add",)


# ------------------------------------------------------------------------------------------------ buffer sets


@pytest.mark.parametrize("set_bytes", [1, 4096, 10**6, 50 << 20, 125 << 20, 16 * (50 << 20)])
def test_the_sets_together_exceed_the_cache_where_a_graph_holds_them(set_bytes: int) -> None:
    cache_bytes = 50 << 20
    count = sets_for(set_bytes, cache_bytes)
    assert 2 <= count <= timing.MAX_NODES
    assert count * set_bytes >= 2.5 * cache_bytes or count == timing.MAX_NODES
    assert count == 2 or (count - 1) * set_bytes < 2.5 * cache_bytes, "no more than are needed"


def test_a_set_far_beyond_the_cache_evicts_itself() -> None:
    assert sets_for(16 * 1000 + 1, 1000) == 1


def test_a_call_that_moves_nothing_has_sets_too() -> None:
    assert sets_for(0, 1000) == timing.MAX_NODES


# ------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_a_kernel_is_timed_in_a_graph() -> None:
    import torch

    sets = [torch.randn(2**24, device="cuda") for _ in range(4)]
    samples = measure([lambda x=x: torch.add(x, 1.0) for x in sets])
    assert (samples.method, samples.note) == ("graph", "")
    assert samples.n >= 3
    rate = 2 * 4 * 2**24 / samples.median_s
    assert 1e11 < rate < 2e13, "no GPU's memory is slower or faster than that"


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_what_cannot_be_captured_is_timed_with_events_and_says_so() -> None:
    import torch

    x = torch.ones((), device="cuda")
    samples = measure(lambda: (x + 1).item())
    assert samples.method == "events"
    assert samples.note.startswith("not captured: ")
    assert "\n" not in samples.note
    assert samples.median_s > 0
    after = measure(lambda: x + 1)
    assert (after.method, after.note) == ("graph", ""), "a failed capture must not spoil the next"
    assert float(x + 1) == 2


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_an_op_without_work_takes_about_a_graph_node() -> None:
    import torch

    x = torch.ones(1, device="cuda")
    assert 2e-7 < measure(lambda: x + 1).median_s < 5e-6
    assert call_seconds(lambda: x + 1, device="cuda") > measure(lambda: x + 1).median_s, "Python costs more"


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_call_seconds_does_not_wait_for_the_kernel() -> None:
    import torch

    x = torch.randn(2048, 2048, device="cuda")
    assert call_seconds(lambda: x @ x, device="cuda") < measure(lambda: x @ x).median_s / 2


@pytest.mark.gpu
def test_kernels_are_named() -> None:
    import torch

    x = torch.randn(64, 64, device="cuda")
    (name,) = timing.kernels_of(lambda: torch.softmax(x, -1), device="cuda")
    assert "softmax" in name.lower()
