"""The L2 and shared memory: bandwidth, and latency by pointer chase next to that of device memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sublight import timing
from sublight.backend.device import takes_ptx
from sublight.limits.probe import Context, Probe, rate
from sublight.results import Limit

LINE = 32  # four-byte words in a 128-byte line: a chase takes one word a line
SHARED_BYTES_PER_CLOCK = 128  # per multiprocessor, on every NVIDIA GPU since Volta
FAR_BYTES = 2**29
STEPS = 4096
SHARED_STEPS = 20_000


def measure(context: Context) -> Iterator[Limit]:
    import torch

    from sublight.limits.kernels import cache as kernels

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    l2_bytes = (context.gpu.l2_bytes if context.gpu else None) or 32 * 2**20
    clock_hz = (context.gpu.max_clock_hz or context.gpu.boost_clock_hz) if context.gpu else None

    size = l2_bytes // 4 // 16384 * 16384
    x = torch.randn(size // 4, device="cuda")
    sums = torch.empty(2**20, device="cuda")
    rounds = 20
    samples = timing.measure(partial(kernels.l2_read, x, sums, rounds, 4 * sms), time_limit_s=context.time_limit_s)
    yield rate("l2_read", "B/s", rounds * size, samples, detail={"bytes": size})

    for name, extent in (("latency_hbm", FAR_BYTES), ("latency_l2", l2_bytes // 8)):
        ring, place = _ring(extent), torch.zeros(1, device="cuda", dtype=torch.int32)
        samples = timing.measure(partial(kernels.chase, ring, place, STEPS), time_limit_s=context.time_limit_s)
        yield _latency(name, samples.median_s / STEPS, samples.spread_s / STEPS, samples.n, {"bytes": extent})
    if takes_ptx():
        yield from _shared(context, sms, clock_hz)
    else:
        for name in ("shared_read", "latency_shared"):
            yield Limit(name=name, unit="", unavailable="it is measured in NVIDIA's assembly")


def _shared(context: Context, sms: int, clock_hz: float | None) -> Iterator[Limit]:
    import torch

    from sublight.limits.kernels import cache as kernels

    out = torch.empty(2 * sms * 1024, device="cuda", dtype=torch.int32)
    rounds = 2000
    moved = 2 * sms * 1024 * 16 * kernels.SHARED_LOADS * rounds
    samples = timing.measure(partial(kernels.shared_read, out, rounds, 2 * sms), time_limit_s=context.time_limit_s)
    spec = sms * SHARED_BYTES_PER_CLOCK * clock_hz if clock_hz else None
    yield rate("shared_read", "B/s", moved, samples, spec=spec, detail={"bytes_per_clock_per_sm": 128})
    samples = timing.measure(partial(kernels.shared_chase, out, SHARED_STEPS), time_limit_s=context.time_limit_s)
    seconds, spread = samples.median_s / SHARED_STEPS, samples.spread_s / SHARED_STEPS
    yield _latency("latency_shared", seconds, spread, samples.n, {})


def _ring(extent: int) -> Any:
    """One random cycle through every line of a buffer of so many bytes: `ring[i]` is the word to visit after i."""
    import torch

    order = torch.randperm(extent // (4 * LINE), device="cuda", dtype=torch.int32)
    ring = torch.zeros(extent // 4, device="cuda", dtype=torch.int32)
    ring[order.long() * LINE] = order.roll(-1) * LINE
    return ring


def _latency(name: str, seconds: float, spread: float, n: int, detail: dict[str, Any]) -> Limit:
    return Limit(name=name, unit="s", value=seconds, spread=spread, n=n, detail=detail)


CACHE = Probe(
    name="caches",
    names=("l2_read", "shared_read", "latency_hbm", "latency_l2", "latency_shared"),
    kinds=("cuda",),
    measure=measure,
)
