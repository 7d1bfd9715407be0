"""The L2 and shared memory: reads that stay in one of them, and chases in which every load waits for the one before."""

from __future__ import annotations

from typing import Any

from sublight.backend.jit import tl, triton

SHARED_LOADS = 4  # in one round of the bandwidth kernel

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
