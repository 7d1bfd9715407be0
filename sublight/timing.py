"""Time a call so that the figure can be believed.

On a GPU the launches are captured in a CUDA graph over several buffer sets, together larger than the L2, and the
graph's replays are timed with events: Python's launch cost never stands in for the kernel's, and no input is read from
a cache that a real caller would find cold. On the CPU, calls are timed with the wall clock over the same buffer sets.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sublight import nvml
from sublight.backend import private
from sublight.results import Samples

if TYPE_CHECKING:
    import torch

Thunk = Callable[[], Any]  # a call with its tensors bound: what is timed
RELATIVE_ERROR = 0.005  # stop when the mean's standard error is at most this share of the mean
MIN_SAMPLES = 10
MAX_SAMPLES = 1000
REPLAY_S = 2e-3  # a replay is made this long, so that starting it (some µs) does not count
MAX_NODES = 2048  # launches in one graph
CPU_SAMPLE_S = 1e-3
TURN_S = 1e-3
CALLS = 200  # launches that a GPU's queue takes without making the caller wait
ENERGY_SPAN_S = 0.3  # NVML's energy counter moves in steps of up to 100 ms


def measure(
    calls: Thunk | Sequence[Thunk], *, device: str = "cuda", time_limit_s: float = 0.5, keep_outputs: bool = True
) -> Samples:
    """Time one call, or the same call over several buffer sets in turn.

    With `keep_outputs` every launch of a graph has an output of its own, so that none is written into lines that the
    cache still holds; outputs far larger than the cache need it not, and take turns in the same memory as a user's do.

    >>> samples = measure(lambda: sum(range(1000)), device="cpu", time_limit_s=0.05)
    >>> samples.method, samples.n >= 3, samples.median_s > 0
    ('wall', True, True)
    """
    thunks = [calls] if callable(calls) else list(calls)
    return _on_gpu(thunks, time_limit_s, keep_outputs) if device == "cuda" else _on_cpu(thunks, time_limit_s)


def call_seconds(call: Thunk, *, device: str, time_limit_s: float = 0.05) -> float:
    """What one eager call costs its caller: wall time with Python, launches not waited for one by one."""
    return calls_in_turns([call], device=device, time_limit_s=time_limit_s)[0]


def calls_in_turns(calls: Sequence[Thunk], *, device: str, time_limit_s: float = 0.05) -> list[float]:
    """`call_seconds` of each. Calls take turns of a millisecond: a host that is busy for a while slows them all, and no
    queue of launches is full at the end of a turn, which would make a caller wait for the device."""
    synchronize = _synchronize(device)
    for call in calls:
        for _ in range(3):
            call()

    def turn(call: Thunk) -> float:
        synchronize()
        rounds, begin = 0, time.perf_counter()
        while rounds < CALLS and (rounds < 2 or time.perf_counter() - begin < TURN_S):
            call()
            rounds += 1
        return (time.perf_counter() - begin) / rounds  # before the synchronize: what is queued is the device's time

    turns: list[list[float]] = []
    begin = time.perf_counter()
    while len(turns) < 3 or (len(turns) < MAX_SAMPLES and time.perf_counter() - begin < time_limit_s * len(calls)):
        turns.append([turn(call) for call in calls])
    synchronize()
    return [statistics.median(times_s) for times_s in zip(*turns, strict=True)]


def kernels_of(call: Thunk, *, device: str) -> tuple[str, ...]:
    """The names of what really ran: kernels on a GPU, PyTorch's operators on the CPU."""
    return _cuda_kernels(call) if device == "cuda" else _cpu_operators(call)


def _cuda_kernels(call: Thunk) -> tuple[str, ...]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    return tuple(name for name in names if not name.startswith("Memset"))


def _cpu_operators(call: Thunk) -> tuple[str, ...]:
    call()  # once before, so that kernels of a first use are not listed
    names: list[str] = []

    class Listen(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view and "empty" not in func.name():
                names.append(func.name().split(".")[0])
            return func(*args, **(kwargs or {}))

    with Listen():
        call()
    return tuple(names)


def sets_for(set_bytes: int, cache_bytes: int) -> int:
    """How many buffer sets exceed the cache two and a half times, within what one graph holds.

    >>> sets_for(64 << 20, 50 << 20), sets_for(1 << 33, 50 << 20), sets_for(4096, 50 << 20)
    (2, 1, 2048)
    """
    if set_bytes > 16 * cache_bytes:
        return 1
    return min(MAX_NODES, max(2, math.ceil(2.5 * cache_bytes / max(set_bytes, 1))))


def _synchronize(device: str) -> Callable[[], None]:
    if device != "cuda":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def _settled(times_s: Sequence[float]) -> bool:
    if len(times_s) < MIN_SAMPLES:
        return False
    error = statistics.stdev(times_s) / math.sqrt(len(times_s))
    return error <= RELATIVE_ERROR * statistics.fmean(times_s)


def collect(sample: Callable[[], float], time_limit_s: float) -> list[float]:
    """Samples until their mean is known to half a percent, or until time runs out (three at least)."""
    times_s: list[float] = []
    begin = time.perf_counter()
    while len(times_s) < MAX_SAMPLES and not _settled(times_s):
        times_s.append(sample())
        if len(times_s) >= 3 and time.perf_counter() - begin > time_limit_s:
            break
    return times_s


def _on_cpu(thunks: list[Thunk], time_limit_s: float) -> Samples:
    for thunk in thunks[:2]:
        thunk()
    begin = time.perf_counter()
    thunks[0]()
    once_s = max(time.perf_counter() - begin, 1e-7)
    rounds = max(1, math.ceil(CPU_SAMPLE_S / (once_s * len(thunks))))

    def sample() -> float:
        begin = time.perf_counter()
        for _ in range(rounds):
            for thunk in thunks:
                thunk()
        return (time.perf_counter() - begin) / (rounds * len(thunks))

    return Samples(times_s=tuple(collect(sample, time_limit_s)), method="wall")


def _on_gpu(thunks: list[Thunk], time_limit_s: float, keep_outputs: bool) -> Samples:
    import torch

    stream = side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for thunk in (thunks * 3)[: max(3, len(thunks))]:
            thunk()
        once_s = _events_sample(thunks[:16], stream)
    rounds = max(1, math.floor(min(REPLAY_S / (once_s * len(thunks)) + 1, MAX_NODES / len(thunks))))
    try:
        graph, keep = capture(thunks * rounds, stream, keep_outputs=keep_outputs)
    except RuntimeError as error:  # what cannot be captured is timed launch by launch, and the result says so
        torch.cuda.synchronize()
        capture([lambda: torch.zeros(1, device="cuda")], stream, keep_outputs=False)  # PyTorch's generator still waits
        with torch.cuda.stream(stream):
            times_s = collect(lambda: _events_sample(thunks * rounds, stream), time_limit_s)
        return Samples(times_s=tuple(times_s), method="events", note=f"not captured: {str(error).splitlines()[0]}")
    launches = rounds * len(thunks)
    before = nvml.state()

    def sample() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record(stream)
            graph.replay()
            end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / launches

    sample()
    begin, energy = time.perf_counter(), nvml.energy_j()
    times_s = collect(sample, time_limit_s)
    span_s, used = time.perf_counter() - begin, nvml.energy_j()
    after = nvml.state()
    del keep
    per_call = (used - energy) / (len(times_s) * launches) if used is not None and energy is not None else None
    return Samples(
        times_s=tuple(times_s),
        method="graph",
        clock_mhz=(before.clock_mhz, after.clock_mhz) if before and after else None,
        throttle=after.throttle if after else (),
        energy_j=per_call if span_s >= ENERGY_SPAN_S else None,
    )


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """One stream for all measurements: the allocator keeps a pool for each, and the default one cannot be captured."""
    import torch

    return torch.cuda.Stream()


def capture(
    thunks: Sequence[Thunk], stream: torch.cuda.Stream, *, keep_outputs: bool
) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """One graph of all the launches, and the outputs that must live as long as it is replayed."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        keep = []
        for thunk in thunks:
            output = thunk()
            if keep_outputs:
                keep.append(output)
    return graph, keep


def _events_sample(thunks: list[Thunk], stream: torch.cuda.Stream) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    for thunk in thunks:
        thunk()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / len(thunks)
