"""The L2 and shared memory: bandwidth, and latency by pointer chase next to that of device memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sublight import timing
from sublight.backend.jit import tl, triton
from sublight.limits.probe import Context, Probe, rate
from sublight.results import Limit

LINE = 32  # four-byte words in a 128-byte line: a chase takes one word a line
SHARED_BYTES_PER_CLOCK = 128  # of one multiprocessor, on every NVIDIA GPU since Volta
SHARED_LOADS = 4  # in one round of the bandwidth kernel
FAR_BYTES = 2**29
STEPS = 4096
SHARED_STEPS = 20_000

_CHASE = """{
.shared .align 16 .b32 ring[32];
.reg .u32 here, left;
.reg .pred more;
mov.u32 here, ring;
st.volatile.shared.u32 [here], here;
mov.u32 left, $1;
again:
ld.volatile.shared.u32 here, [here];
sub.u32 left, left, 1;
setp.ne.u32 more, left, 0;
@more bra again;
mov.u32 $0, here;
}"""  # a word that holds its own address: every load waits for the one before
_STREAM = """{
.shared .align 16 .b8 room[16384];
.reg .u32 here, left, a, b, c, d, sum;
.reg .pred more;
mov.u32 here, %tid.x;
shl.b32 here, here, 4;
mov.u32 sum, room;
add.u32 here, here, sum;
mov.u32 left, $1;
again:
LOADS
sub.u32 left, left, 1;
setp.ne.u32 more, left, 0;
@more bra again;
mov.u32 $0, sum;
}""".replace(
    "LOADS", "\n".join(["ld.volatile.shared.v4.u32 {a, b, c, d}, [here];\nxor.b32 sum, sum, a;"] * SHARED_LOADS)
)  # 16 bytes a thread, neighbours next to one another: no bank conflict
CHASE, STREAM = tl.constexpr(_CHASE), tl.constexpr(_STREAM)


@triton.jit
def _l2_read_kernel(x_ptr, sums_ptr, n, rounds, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(rounds):
        for block in tl.range(tl.program_id(0), n // BLOCK, tl.num_programs(0)):
            total += tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")  # past the L1
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _chase_kernel(next_ptr, place_ptr, steps):
    place = tl.load(place_ptr)
    for _ in range(steps):
        place = tl.load(next_ptr + place, cache_modifier=".cg")
    tl.store(place_ptr, place)  # the next launch goes on from here, so that it meets lines it has not seen


@triton.jit
def _shared_chase_kernel(out_ptr, steps):
    tl.store(out_ptr, tl.inline_asm_elementwise(CHASE, "=r,r", [steps], dtype=tl.int32, is_pure=False, pack=1))


@triton.jit
def _shared_read_kernel(out_ptr, rounds, THREADS: tl.constexpr):
    thread = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    many = tl.zeros([THREADS], tl.int32) + rounds
    value = tl.inline_asm_elementwise(STREAM, "=r,r", [many], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out_ptr + thread, value)


def l2_read(x: Any, sums: Any, rounds: int, programs: int) -> None:
    _l2_read_kernel[(programs,)](x, sums, x.numel(), rounds, BLOCK=4096, num_warps=8)


def chase(ring: Any, place: Any, steps: int) -> None:
    _chase_kernel[(1,)](ring, place, steps, num_warps=1)


def shared_chase(out: Any, steps: int) -> None:
    _shared_chase_kernel[(1,)](out, steps, num_warps=1)


def shared_read(out: Any, rounds: int, programs: int) -> None:
    _shared_read_kernel[(programs,)](out, rounds, THREADS=1024, num_warps=32)


def measure(context: Context) -> Iterator[Limit]:
    import torch

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    l2_bytes = (context.gpu.l2_bytes if context.gpu else None) or 32 * 2**20
    clock_hz = (context.gpu.max_clock_hz or context.gpu.boost_clock_hz) if context.gpu else None

    size = l2_bytes // 4 // 16384 * 16384
    x = torch.randn(size // 4, device="cuda")
    sums = torch.empty(2**20, device="cuda")
    rounds = 20
    samples = timing.measure(partial(l2_read, x, sums, rounds, 4 * sms), time_limit_s=context.time_limit_s)
    yield rate("l2_read", "B/s", rounds * size, samples, detail={"bytes": size})

    out = torch.empty(2 * sms * 1024, device="cuda", dtype=torch.int32)
    rounds = 2000
    moved = 2 * sms * 1024 * 16 * SHARED_LOADS * rounds
    samples = timing.measure(partial(shared_read, out, rounds, 2 * sms), time_limit_s=context.time_limit_s)
    spec = sms * SHARED_BYTES_PER_CLOCK * clock_hz if clock_hz else None
    yield rate("shared_read", "B/s", moved, samples, spec=spec, detail={"bytes_per_clock_per_sm": 128})

    for name, extent in (("latency_hbm", FAR_BYTES), ("latency_l2", l2_bytes // 8)):
        ring, place = _ring(extent), torch.zeros(1, device="cuda", dtype=torch.int32)
        samples = timing.measure(partial(chase, ring, place, STEPS), time_limit_s=context.time_limit_s)
        yield _latency(name, samples.median_s / STEPS, samples.spread_s / STEPS, samples.n, {"bytes": extent})
    samples = timing.measure(partial(shared_chase, out, SHARED_STEPS), time_limit_s=context.time_limit_s)
    seconds, spread = samples.median_s / SHARED_STEPS, samples.spread_s / SHARED_STEPS
    yield _latency("latency_shared", seconds, spread, samples.n, {})


def _ring(extent: int) -> Any:
    """One random cycle through every line of so many bytes: `ring[i]` is where to go from i."""
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
