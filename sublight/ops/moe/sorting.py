"""Rows sorted by expert without a sort: an expert's row is how many come before it, by prefix sums as in `compact`.

A pair is a token and one of the experts it goes to; pairs are numbered token by token. Each program takes a chunk of
pairs and counts, for every pair, how many of the chunk before it go to the same expert. The chunks' counts are added up
expert by expert, then the experts' counts, and a pair's place is the sum of the three. Counts are whole numbers: any
order of adding gives the same, and pairs of one expert keep their order. Nothing of it is looked at on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sublight.backend.jit import cdiv, next_power_of_2, tl, triton
from sublight.backend.launch import Step
from sublight.op import Buffer, Kernel

CHUNK = 128  # pairs a program: it compares each with each
MOST_EXPERTS_AT_ONCE = 64
MOST_CHUNKS_AT_ONCE = 1024


@triton.jit
def _expert_of(index_ptr, pair, n, experts):
    """-1 for what is no expert: such a pair gets no row."""
    expert = tl.load(index_ptr + pair, mask=pair < n, other=-1)
    return tl.where((expert >= 0) & (expert < experts), expert, -1).to(tl.int32)


@triton.jit
def _count_kernel(index_ptr, rank_ptr, counts_ptr, n, chunks, experts, CHUNK: tl.constexpr):
    """How many pairs of the chunk before each go to its expert; the last pair of an expert knows the chunk's count."""
    chunk = tl.program_id(0)
    near = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + near
    expert = _expert_of(index_ptr, pair, n, experts)
    same = expert[:, None] == expert[None, :]
    before = tl.sum((same & (near[None, :] < near[:, None])).to(tl.int32), 1)
    behind = tl.sum((same & (near[None, :] > near[:, None])).to(tl.int32), 1)
    tl.store(rank_ptr + pair, before, mask=pair < n)
    tl.store(counts_ptr + expert.to(tl.int64) * chunks + chunk, before + 1, mask=(expert >= 0) & (behind == 0))


@triton.jit
def _sum_kernel(counts_ptr, total_ptr, chunks, BLOCK: tl.constexpr):
    """Of an expert: how many rows it has from the chunks before each, and in all."""
    expert = tl.program_id(0).to(tl.int64)
    total = 0
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + expert * chunks + chunk, mask=chunk < chunks, other=0)
        tl.store(counts_ptr + expert * chunks + chunk, total + tl.cumsum(counts, 0) - counts, mask=chunk < chunks)
        total += tl.sum(counts, 0)
    tl.store(total_ptr + expert, total)


@triton.jit
def _place_kernel(
    index_ptr, rank_ptr, counts_ptr, total_ptr, place_ptr, source_ptr, ends_ptr, n, chunks, experts,
    CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The row of each pair, -1 where it has none; the pair of each row; the first program also says where experts
    end."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _expert_of(index_ptr, pair, n, experts)
    begin = tl.zeros([CHUNK], tl.int32)
    so_far = 0
    for start in range(0, experts, EXPERTS):
        other = start + tl.arange(0, EXPERTS)
        totals = tl.load(total_ptr + other, mask=other < experts, other=0)
        begin += tl.sum(tl.where(other[None, :] < expert[:, None], totals[None, :], 0), 1)
        if chunk == 0:
            tl.store(ends_ptr + other, so_far + tl.cumsum(totals, 0), mask=other < experts)
        so_far += tl.sum(totals, 0)
    has_row = expert >= 0
    earlier = tl.load(counts_ptr + expert.to(tl.int64) * chunks + chunk, mask=has_row, other=0)
    place = begin + earlier + tl.load(rank_ptr + pair, mask=has_row, other=0)
    tl.store(place_ptr + pair, tl.where(has_row, place, -1), mask=pair < n)
    tl.store(source_ptr + place, pair, mask=has_row)


KERNELS = tuple(Kernel(jit=kernel) for kernel in (_count_kernel, _sum_kernel, _place_kernel))


class Sorting(NamedTuple):
    """The launches that give `place` (row of a pair), `source` (pair of a row) and `ends` (row after an expert's last)
    from the argument `index`, and what they write to."""

    steps: tuple[Step, ...]
    buffers: dict[str, Buffer]


def sort_by_expert(pairs: int, experts: int) -> Sorting:
    chunks = cdiv(pairs, CHUNK)
    sizes = {"rank": pairs, "total": experts, "place": pairs, "source": pairs, "ends": experts}
    buffers = {name: Buffer(shape=(size,), dtype=torch.int32) for name, size in sizes.items()}
    buffers["counts"] = Buffer(shape=(experts, chunks), dtype=torch.int32, is_zero=True)
    at_once = min(MOST_EXPERTS_AT_ONCE, next_power_of_2(experts))
    steps = (
        Step(_count_kernel, (chunks,), pairs, chunks, experts, on="index rank counts", CHUNK=CHUNK, num_warps=4),
        Step(
            _sum_kernel, (experts,), chunks,
            on="counts total", BLOCK=min(MOST_CHUNKS_AT_ONCE, next_power_of_2(chunks)), num_warps=4,
        ),
        Step(
            _place_kernel, (chunks,), pairs, chunks, experts,
            on="index rank counts total place source ends", CHUNK=CHUNK, EXPERTS=at_once, num_warps=4,
        ),
    )  # fmt: skip
    return Sorting(steps, buffers)
