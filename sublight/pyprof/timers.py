"""The clocks that programs are timed with: what each measures, what a reading costs and resolves on this machine.

And the mistakes that people make with them, made here on purpose: each is run, and its figure stands beside the right
one. The last of them needs a GPU: a call that only starts work on a device returns long before the work is done.
"""

from __future__ import annotations

import random
import re
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sublight import nvml

READINGS = 2000  # of a clock, for its cost and its step
TURNS = 5  # the fastest of so many counts: what else runs makes a clock slower, never faster
SLEEP_S = 0.05
DATA_BYTES = 1 << 20
MATMUL = 4096
NO_GPU = "needs a GPU: none here"
Clock = Callable[[], float]  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """A clock; `reason` says why there are no figures."""

    name: str
    measures: str
    use: str
    cost_s: float | None = None  # of one reading
    step_s: float | None = None  # the smallest difference between two readings that was seen
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A wrong way to time something and the right one, both run here."""

    title: str
    wrong: str
    wrong_s: float | None = None
    right: str
    right_s: float | None = None
    why: str
    reason: str = ""  # why it was not run


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    timers: tuple[Timer, ...]
    mistakes: tuple[Mistake, ...]
    device: str = ""  # the GPU's name

    def to_json(self) -> dict[str, Any]:
        timer = ("name", "measures", "use", "cost_s", "step_s", "reason")
        mistake = ("title", "wrong", "wrong_s", "right", "right_s", "why", "reason")
        return {
            "device": self.device,
            "timers": [{name: getattr(one, name) for name in timer} for one in self.timers],
            "mistakes": [{name: getattr(one, name) for name in mistake} for one in self.mistakes],
        }


HOST = (
    (
        "time.perf_counter",
        time.perf_counter,
        "wall time, sleep included; never goes back",
        "anything that you wait for",
    ),
    ("time.monotonic", time.monotonic, "wall time since the machine started; never goes back", "deadlines"),
    ("time.time", time.time, "the date: may jump, even back, when it is set right", "when something happened"),
    (
        "time.process_time",
        time.process_time,
        "CPU time of all threads of this process; no sleep",
        "work done, any thread",
    ),
    ("time.thread_time", time.thread_time, "CPU time of the calling thread; no sleep", "work done, this thread"),
)


def clocks() -> Clocks:
    """All of them; those of a GPU with the reason where there is none."""
    torch = _torch_with_gpu()
    timers = [_host_timer(name, clock, measures, use) for name, clock, measures, use in HOST]
    return Clocks(
        timers=(*timers, *_device_timers(torch)),
        mistakes=(slept(), other_threads(), too_short(), first_call(), _async_launch(torch)),
        device=torch.cuda.get_device_name() if torch else "",
    )


def _host_timer(name: str, clock: Clock, measures: str, use: str) -> Timer:
    return Timer(name=name, measures=measures, use=use, cost_s=cost_s(clock), step_s=step_s(clock))


def cost_s(clock: Clock, *, wall: Clock = time.perf_counter) -> float:
    """The cost of one reading: the fastest of several counts, less the loop's own time."""
    best_s = empty_s = float("inf")
    for _ in range(TURNS):
        began_s = wall()
        for _ in range(READINGS):
            pass
        middle_s = wall()
        for _ in range(READINGS):
            clock()
        end_s = wall()
        empty_s, best_s = min(empty_s, middle_s - began_s), min(best_s, end_s - middle_s)
    return max(best_s - empty_s, 0.0) / READINGS


def step_s(clock: Clock) -> float | None:
    """The smallest step between readings; None where it never moved.

    >>> readings = iter([0.0, 0.0, 1.0, 1.0, 3.0] + [3.0] * READINGS)
    >>> step_s(lambda: next(readings))
    1.0
    """
    smallest: float | None = None
    before_s = clock()
    for _ in range(READINGS):
        now_s = clock()
        if now_s > before_s and (smallest is None or now_s - before_s < smallest):
            smallest = now_s - before_s
        before_s = now_s
    return smallest


def spent_s(work: Callable[[], object], clock: Clock) -> float:
    before_s = clock()
    work()
    return clock() - before_s


def slept() -> Mistake:
    times = {clock: spent_s(lambda: time.sleep(SLEEP_S), clock) for clock in (time.process_time, time.perf_counter)}
    return Mistake(
        title=f"a wait of {SLEEP_S * 1e3:.0f} ms, by a clock of CPU time",
        wrong="time.process_time",
        wrong_s=times[time.process_time],
        right="time.perf_counter",
        right_s=times[time.perf_counter],
        why="CPU clocks stand still while a program sleeps or waits for a disk, a network, a lock or a GPU",
    )


def other_threads() -> Mistake:
    data = random.Random(0).randbytes(DATA_BYTES)

    def work() -> None:
        thread = threading.Thread(target=zlib.compress, args=(data,))
        thread.start()
        thread.join()

    return Mistake(
        title="work that another thread does, by the clock of this one",
        wrong="time.thread_time",
        wrong_s=spent_s(work, time.thread_time),
        right="time.process_time",
        right_s=spent_s(work, time.process_time),
        why="a library may compute in threads of its own, as PyTorch does: this thread's clock sees none of it",
    )


def too_short() -> Mistake:
    values = [1, 2, 3]
    single_s = min(spent_s(lambda: len(values), time.perf_counter) for _ in range(100))
    many_s = cost_s(lambda: len(values))
    return Mistake(
        title="one call of len, between two readings",
        wrong="one call",
        wrong_s=single_s,
        right=f"{READINGS:,} calls, divided",
        right_s=many_s,
        why="the readings themselves are in the figure: repeat until it is 1,000 times a reading's cost",
    )


def first_call() -> Mistake:
    re.purge()
    pattern = r"(\w+)@(\w+)\.(com|org|net)[a-z]*(?:x|y)+"
    first_s = spent_s(lambda: re.match(pattern, "a@b.comx"), time.perf_counter)
    later_s = min(spent_s(lambda: re.match(pattern, "a@b.comx"), time.perf_counter) for _ in range(20))
    return Mistake(
        title="the first call of a regular expression",
        wrong="the first",
        wrong_s=first_s,
        right="the fastest of 20 more",
        right_s=later_s,
        why="first calls import, compile and fill caches; on a GPU they also load kernels: warm up, then time",
    )


def _torch_with_gpu() -> Any:
    """torch, where it can use a GPU; it is not imported where there is none."""
    if nvml.health() is None:
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _device_timers(torch: Any) -> list[Timer]:
    events = ("torch.cuda.Event", "time on the device between two points of a stream", "kernels, without the host")
    waits = ("torch.cuda.synchronize", "no clock: waits until the device has done all", "before a host's clock is read")
    if torch is None:
        return [Timer(name=name, measures=what, use=use, reason=NO_GPU) for name, what, use in (events, waits)]
    torch.cuda.synchronize()

    def event_pairs() -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(200)]
        for begin, end in pairs:
            begin.record()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]

    event = torch.cuda.Event(enable_timing=True)
    event.record()  # made on first use
    steps = sorted(took_s for took_s in event_pairs() if took_s > 0)
    torch.cuda.synchronize()
    idle_s = cost_s(torch.cuda.synchronize)
    return [
        Timer(name=events[0], measures=events[1], use=events[2], cost_s=cost_s(event.record),
              step_s=steps[0] if steps else None),
        Timer(name=waits[0], measures=waits[1], use=waits[2], cost_s=idle_s),
    ]  # fmt: skip


def _async_launch(torch: Any) -> Mistake:
    wrong_s, right_s = _launched_s(torch) if torch else (None, None)
    return Mistake(
        title=f"a matmul of {MATMUL} x {MATMUL} on a GPU, without waiting for it",
        wrong="time.perf_counter",
        wrong_s=wrong_s,
        right="and torch.cuda.synchronize",
        right_s=right_s,
        why="a call returns when its kernels are queued, not when they have run: synchronize before each reading, "
        "or use events; `sublight bench` and `sublight.measure` do",
        reason="" if torch else NO_GPU,
    )


def _launched_s(torch: Any) -> tuple[float, float]:
    """What ten matmuls seem to take, each, and what they do."""
    a = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)

    def launch() -> None:
        for _ in range(10):
            a @ a

    def finish() -> None:
        launch()
        torch.cuda.synchronize()

    finish()  # the first call loads the kernel
    wrong_s = spent_s(launch, time.perf_counter) / 10
    torch.cuda.synchronize()
    return wrong_s, spent_s(finish, time.perf_counter) / 10
