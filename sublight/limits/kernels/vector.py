"""Chains of fused multiply-adds that touch no memory."""

from __future__ import annotations

from typing import Any

from sublight.backend.jit import tl, triton

THREADS, CHAINS = 128, 8  # of one program; independent chains in a thread hide the latency of each
UNROLL = 32


@triton.jit
def _multiply_add_kernel(x_ptr, rounds, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    total = x
    for _ in range(rounds):
        for _ in tl.static_range(UNROLL):
            total = total * x + x
    tl.store(x_ptr + place, total)


def multiply_add(x: Any, rounds: int, programs: int) -> None:
    block = THREADS * CHAINS
    _multiply_add_kernel[(programs,)](x, rounds, BLOCK=block, UNROLL=UNROLL, num_warps=THREADS // 32)
