"""Device memory: copy, triad, write and read, 16 bytes a thread at a time."""

from __future__ import annotations

from typing import Any

from sublight.backend.jit import cdiv, tl, triton

FLAT = ((512, 4), (1024, 8), (1024, 4))  # elements and warps of a program that does one block
READERS = ((4096, 8, 4), (8192, 16, 2))  # elements, warps and programs on a multiprocessor that reads many


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
