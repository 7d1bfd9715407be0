"""Compaction by a running sum. Page: `sublight learn show compact`. Check: `sublight learn check compact`."""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def count_kernel(keep_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(keep_ptr + place, mask=place < n, other=0).to(tl.int32)
    tl.store(counts_ptr + block, 0)  # TODO 1: how many this block chooses


@triton.jit
def compact_kernel(x_ptr, keep_ptr, counts_ptr, out_ptr, count_ptr, n, blocks, BLOCK: tl.constexpr, ALL: tl.constexpr):
    block = tl.program_id(0)
    each = tl.arange(0, ALL)
    counts = tl.load(counts_ptr + each, mask=each < blocks, other=0)
    before = 0  # TODO 2: how many the blocks before this one choose
    total = tl.sum(counts, axis=0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    keep = tl.load(keep_ptr + place, mask=mask, other=0).to(tl.int32)
    chosen = before  # TODO 3: for each element, how many are chosen before it
    target = tl.where(keep != 0, chosen, total + place - chosen)
    x = tl.load(x_ptr + place, mask=mask)
    tl.store(out_ptr + target, x, mask=mask)
    if block == 0:
        tl.store(count_ptr, total)


def compact(x: torch.Tensor, keep: torch.Tensor, out: torch.Tensor, count: torch.Tensor) -> None:
    n = x.numel()
    blocks = triton.cdiv(n, BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=x.device)
    flags = keep.view(torch.int8)  # bytes of 0 and 1
    count_kernel[(blocks,)](flags, counts, n, BLOCK=BLOCK)
    every = triton.next_power_of_2(blocks)
    compact_kernel[(blocks,)](x, flags, counts, out, count, n, blocks, BLOCK=BLOCK, ALL=every)
