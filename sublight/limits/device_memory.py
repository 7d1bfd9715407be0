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
from sublight.backend.jit import cdiv, tl, triton
from sublight.limits.probe import Context, Probe, rate
from sublight.results import Limit, Samples
from sublight.timing import Thunk

BYTES = 2**30
FLAT = ((512, 4), (1024, 8), (1024, 4))  # elements and warps of a program that does one block
READERS = ((4096, 8, 4), (8192, 16, 2))  # elements, warps and programs on a multiprocessor that reads many
CURVE_WARPS = (4, 16)
KNEE = 0.95  # of the best point


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + place, tl.load(x_ptr + place, mask=place < n), mask=place < n)


@triton.jit
def _triad_kernel(x_ptr, y_ptr, z_ptr, scale, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    tl.store(z_ptr + place, tl.load(x_ptr + place, mask=mask) + scale * tl.load(y_ptr + place, mask=mask), mask=mask)


@triton.jit
def _write_kernel(y_ptr, value, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + place, tl.zeros([BLOCK], tl.float32) + value, mask=place < n)


@triton.jit
def _read_kernel(x_ptr, sums_ptr, n, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(tl.program_id(0), n // (BLOCK * UNROLL), tl.num_programs(0)):
        for step in tl.static_range(UNROLL):
            place = (tl.full([], 0, tl.int64) + block) * (BLOCK * UNROLL) + step * BLOCK + tl.arange(0, BLOCK)
            total += tl.load(x_ptr + place)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


def copy(x: Any, y: Any, block: int, warps: int) -> None:
    _copy_kernel[(cdiv(x.numel(), block),)](x, y, x.numel(), BLOCK=block, num_warps=warps)


def triad(x: Any, y: Any, z: Any, block: int, warps: int) -> None:
    _triad_kernel[(cdiv(x.numel(), block),)](x, y, z, 1.5, x.numel(), BLOCK=block, num_warps=warps)


def write(y: Any, block: int, warps: int) -> None:
    _write_kernel[(cdiv(y.numel(), block),)](y, 1.5, y.numel(), BLOCK=block, num_warps=warps)


def read(x: Any, sums: Any, block: int, warps: int, programs: int) -> None:
    _read_kernel[(programs,)](x, sums, x.numel(), BLOCK=block, UNROLL=2, num_warps=warps)


def measure(context: Context) -> Iterator[Limit]:
    import torch

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
    reads = [(f"{b}x{w}", partial(read, x, sums, b, w, sms * per)) for b, w, per in READERS]
    best = _best(reads, context)
    curve = _curve(x, sums, sms, context)
    read_detail = {"bytes": size, "way": best[0], "torch": size / torch_s["read"], "curve": curve, "knee": _knee(curve)}
    yield rate("hbm_read", "B/s", size, best[1], spec=spec, detail=read_detail)
    for name, moves, call in (
        ("hbm_write", 1, partial(write, y)),
        ("hbm_copy", 2, partial(copy, x, y)),
        ("hbm_triad", 3, partial(triad, x, y, z)),
    ):
        way, samples = _best([(f"{b}x{w}", partial(call, b, w)) for b, w in FLAT], context)
        detail: dict[str, Any] = {"bytes": size, "way": way}
        if name[4:] in torch_s:
            detail["torch"] = moves * size / torch_s[name[4:]]
        yield rate(name, "B/s", moves * size, samples, spec=spec, detail=detail)
    small = l2_bytes // 8 // 4
    way, samples = _best([(f"{b}x{w}", partial(copy, x[:small], y[:small], b, w)) for b, w in FLAT], context)
    yield rate("l2_copy", "B/s", 8 * small, samples, detail={"bytes": 4 * small, "way": way})


def _eager_s(call: Thunk) -> float:
    """What PyTorch's own operator takes, ten in a row: milliseconds, so launches do not show."""
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
    counts = [1, 4, 16, 32, sms // 2, sms, 2 * sms, 4 * sms, 8 * sms]
    part = x[: x.numel() // 4]
    points: list[list[float]] = []
    for warps in CURVE_WARPS[-1:] if context.quick else CURVE_WARPS:
        for programs in counts[1::2] if context.quick else counts:
            samples = timing.measure(partial(read, part, sums, 256 * warps, warps, programs), time_limit_s=0.02)
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
