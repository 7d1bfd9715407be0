"""Compaction by a running sum. Page: `sublight learn show compact`. Check: `sublight learn check compact`."""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def count_kernel(keep_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(keep_ptr + place, mask=place < n, other=0).to(tl.int32)
    tl.store(counts_ptr + block, 0)  # TODO 1: how many this block chooses


@triton.jit
def starts_kernel(counts_ptr, starts_ptr, count_ptr, blocks, ALL: tl.constexpr):
    each = tl.arange(0, ALL)
    counts = tl.load(counts_ptr + each, mask=each < blocks, other=0)
    before = counts * 0  # TODO 2: for each block, how many the blocks before it choose
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
    chosen = before  # TODO 3: for each element, how many are chosen before it
    target = tl.where(keep != 0, chosen, total + place - chosen)
    x = tl.load(x_ptr + place, mask=mask)
    tl.store(out_ptr + target, x, mask=mask)


def compact(x: torch.Tensor, keep: torch.Tensor, out: torch.Tensor, count: torch.Tensor) -> None:
    n = x.numel()
    blocks = triton.cdiv(n, BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=x.device)
    starts = torch.empty_like(counts)
    flags = keep.view(torch.int8)  # bytes of 0 and 1
    count_kernel[(blocks,)](flags, counts, n, BLOCK=BLOCK)
    starts_kernel[(1,)](counts, starts, count, blocks, ALL=triton.next_power_of_2(blocks), num_warps=16)
    compact_kernel[(blocks,)](x, flags, starts, out, count, n, BLOCK=BLOCK)
