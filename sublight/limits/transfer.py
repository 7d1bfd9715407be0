"""Between host and device, and between devices: pinned and pageable, each way and both at once, peer to peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sublight import timing
from sublight.limits.probe import Context, Probe, rate
from sublight.results import Limit, Samples

FULL_BYTES, QUICK_BYTES = 2**28, 2**26
DEVICE_BYTES = 2**30
NAMES = ("h2d_pinned", "d2h_pinned", "both_pinned", "h2d_pageable", "d2h_pageable", "d2d_copy", "peer_copy")


def measure(context: Context) -> Iterator[Limit]:
    import torch

    size = QUICK_BYTES if context.quick else FULL_BYTES
    words = size // 4
    near, away = (torch.randn(words, device="cuda") for _ in range(2))
    pinned, pinned_out = (torch.randn(words).pin_memory() for _ in range(2))
    pageable = torch.randn(words)
    spec = context.gpu.pcie_bytes_per_s if context.gpu else None
    one, other = torch.cuda.Stream(), torch.cuda.Stream()

    def up(source: Any = pinned) -> None:
        near.copy_(source, non_blocking=True)

    def down(target: Any = pinned_out) -> None:
        target.copy_(away, non_blocking=True)

    def both() -> None:
        current = torch.cuda.current_stream()
        for stream, call in ((one, up), (other, down)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                call()
        for stream in (one, other):
            current.wait_stream(stream)

    cases: tuple[tuple[str, float, float | None, Callable[[], None]], ...] = (
        ("h2d_pinned", size, spec, up),
        ("d2h_pinned", size, spec, down),
        ("both_pinned", 2 * size, spec and 2 * spec, both),
        ("h2d_pageable", size, None, lambda: up(pageable)),
        ("d2h_pageable", size, None, lambda: down(pageable)),
    )
    for name, moved, limit, call in cases:
        yield rate(name, "B/s", moved, _timed(call, context), spec=limit, detail={"bytes": size})
    yield _device_to_device(context)
    yield from _peer(context, words)


def _device_to_device(context: Context) -> Limit:
    """The driver's own copy within one GPU; `hbm_copy` is what a kernel reaches."""
    import torch

    here, there = (torch.randn(DEVICE_BYTES // 4, device="cuda") for _ in range(2))
    spec = context.gpu.memory_bytes_per_s if context.gpu else None
    samples = _timed(lambda: there.copy_(here), context)
    return rate("d2d_copy", "B/s", 2 * DEVICE_BYTES, samples, spec=spec, detail={"bytes": DEVICE_BYTES})


def _peer(context: Context, words: int) -> Iterator[Limit]:
    import torch

    if torch.cuda.device_count() < 2:
        yield Limit(name="peer_copy", unit="B/s", unavailable="one GPU: no peer link")
        return
    here, there = (torch.randn(words, device=f"cuda:{index}") for index in (0, 1))
    direct = torch.cuda.can_device_access_peer(0, 1)
    spec = context.gpu.nvlink_bytes_per_s if context.gpu and direct else None
    samples = _timed(lambda: there.copy_(here, non_blocking=True), context)
    yield rate("peer_copy", "B/s", 4 * words, samples, spec=spec, detail={"peer access": direct})


def _timed(call: Callable[[], Any], context: Context) -> Samples:
    """Time launch by launch with events: a transfer takes milliseconds, and a pageable one cannot be captured."""
    import torch

    def sample() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    sample()
    times_s = timing.collect(sample, context.time_limit_s)
    return Samples(times_s=tuple(times_s), method="events")


TRANSFER = Probe(name="transfers", names=NAMES, kinds=("cuda",), measure=measure)
