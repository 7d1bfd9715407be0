"""Device memory: read, write, copy and triad, the number of programs that saturate it, and the L2 set apart from it.

Every thread moves 16 bytes at a time over buffers many times the L2. The same copy over a buffer that fits in the L2 is
measured too (`l2_copy`): it is what a careless benchmark reports as memory bandwidth.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from sublight import timing
from sublight.limits.probe import Context, Probe, rate
from sublight.results import Limit, Samples
from sublight.timing import Thunk

BYTES = 2**30
CURVE_WARPS = (4, 16)
KNEE = 0.95  # share of the best rate from which on a number of programs counts as enough


def measure(context: Context) -> Iterator[Limit]:
    import torch

    from sublight.limits.kernels import device_memory as kernels

    size = BYTES
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    x, y, z = (torch.randn(size // 4, device="cuda") for _ in range(3))
    sums = torch.empty(2**16, device="cuda")
    spec = context.gpu.memory_bytes_per_s if context.gpu else None
    l2_bytes = (context.gpu.l2_bytes if context.gpu else None) or 32 * 2**20

    torch_s = {
        "read": _eager_s(x.sum),
        "write": _eager_s(lambda: y.fill_(1.5)),
        "copy": _eager_s(lambda: y.copy_(x)),  # a graph would turn this into a slower copy
    }
    reads = [(f"{b}x{w}", partial(kernels.read, x, sums, b, w, sms * per)) for b, w, per in kernels.READERS]
    best = _best(reads, context)
    curve = _curve(x, sums, sms, context)
    read_detail = {"bytes": size, "way": best[0], "torch": size / torch_s["read"], "curve": curve, "knee": _knee(curve)}
    yield rate("hbm_read", "B/s", size, best[1], spec=spec, detail=read_detail)
    for name, moves, call in (
        ("hbm_write", 1, partial(kernels.write, y)),
        ("hbm_copy", 2, partial(kernels.copy, x, y)),
        ("hbm_triad", 3, partial(kernels.triad, x, y, z)),
    ):
        way, samples = _best([(f"{b}x{w}", partial(call, b, w)) for b, w in kernels.FLAT], context)
        detail: dict[str, Any] = {"bytes": size, "way": way}
        if name[4:] in torch_s:
            detail["torch"] = moves * size / torch_s[name[4:]]
        yield rate(name, "B/s", moves * size, samples, spec=spec, detail=detail)
    small = l2_bytes // 8 // 4
    way, samples = _best(
        [(f"{b}x{w}", partial(kernels.copy, x[:small], y[:small], b, w)) for b, w in kernels.FLAT], context
    )
    yield rate("l2_copy", "B/s", 8 * small, samples, detail={"bytes": 4 * small, "way": way})


def _eager_s(call: Thunk) -> float:
    """Time of PyTorch's own operator, ten in a row: together they take milliseconds, so launches do not show."""
    import torch

    times_s = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        times_s.append(float(start.elapsed_time(end)) * 1e-4)
    return statistics.median(times_s)


def _best(ways: Sequence[tuple[str, Thunk]], context: Context) -> tuple[str, Samples]:
    timed = [(way, timing.measure(call, time_limit_s=context.time_limit_s)) for way, call in ways]
    return min(timed, key=lambda pair: pair[1].median_s)


def _curve(x: Any, sums: Any, sms: int, context: Context) -> list[list[float]]:
    """[programs, warps, bytes per second] over ever more programs; a quick run takes every second point."""
    from sublight.limits.kernels import device_memory as kernels

    counts = [1, 4, 16, 32, sms // 2, sms, 2 * sms, 4 * sms, 8 * sms]
    part = x[: x.numel() // 4]
    points: list[list[float]] = []
    for warps in CURVE_WARPS[-1:] if context.quick else CURVE_WARPS:
        for programs in counts[1::2] if context.quick else counts:
            samples = timing.measure(partial(kernels.read, part, sums, 256 * warps, warps, programs), time_limit_s=0.02)
            points.append([programs, warps, part.numel() * 4 / samples.median_s])
    return points


def _knee(curve: list[list[float]]) -> dict[str, float]:
    """The fewest programs that reach 95 % of the best point.

    >>> _knee([[1, 4, 10.0], [132, 4, 95.0], [264, 4, 100.0]])
    {'programs': 132, 'warps': 4, 'bytes_per_s': 95.0}
    """
    best = max(point[2] for point in curve)
    programs, warps, value = min((point for point in curve if point[2] >= KNEE * best), key=lambda point: point[0])
    return {"programs": programs, "warps": warps, "bytes_per_s": value}


DEVICE_MEMORY = Probe(
    name="device memory",
    names=("hbm_read", "hbm_write", "hbm_copy", "hbm_triad", "l2_copy"),
    kinds=("cuda",),
    measure=measure,
)
