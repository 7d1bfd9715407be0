"""Compaction in three launches: count what each block chooses, sum the counts, then every element knows its place."""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def count_kernel(keep_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(keep_ptr + place, mask=place < n, other=0).to(tl.int32)
    tl.store(counts_ptr + block, tl.sum(keep, axis=0))


@triton.jit
def starts_kernel(counts_ptr, starts_ptr, count_ptr, blocks, ALL: tl.constexpr):
    each = tl.arange(0, ALL)
    counts = tl.load(counts_ptr + each, mask=each < blocks, other=0)
    before = tl.cumsum(counts, axis=0) - counts
    tl.store(starts_ptr + each, before, mask=each < blocks)
    tl.store(count_ptr, tl.sum(counts, axis=0))


@triton.jit
def compact_kernel(x_ptr, keep_ptr, starts_ptr, out_ptr, count_ptr, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    before = tl.load(starts_ptr + block)
    total = tl.load(count_ptr).to(tl.int32)
    place = block * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    keep = tl.load(keep_ptr + place, mask=mask, other=0).to(tl.int32)
    chosen = before + tl.cumsum(keep, axis=0) - keep
    target = tl.where(keep != 0, chosen, total + place - chosen)
    x = tl.load(x_ptr + place, mask=mask)
    tl.store(out_ptr + target, x, mask=mask)


def compact(x: torch.Tensor, keep: torch.Tensor, out: torch.Tensor, count: torch.Tensor) -> None:
    n = x.numel()
    blocks = triton.cdiv(n, BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=x.device)
    starts = torch.empty_like(counts)
    flags = keep.view(torch.int8)
    count_kernel[(blocks,)](flags, counts, n, BLOCK=BLOCK)
    starts_kernel[(1,)](counts, starts, count, blocks, ALL=triton.next_power_of_2(blocks), num_warps=16)
    compact_kernel[(blocks,)](x, flags, starts, out, count, n, BLOCK=BLOCK)
