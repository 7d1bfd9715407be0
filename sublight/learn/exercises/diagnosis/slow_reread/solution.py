"""x over its largest magnitude: one launch finds each block's, the next one takes the largest of these few."""

import torch
import triton
import triton.language as tl

CAUSE = "read again"
BLOCK = 4096


@triton.jit
def largest_kernel(x_ptr, largest_ptr, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32)
    tl.store(largest_ptr + block, tl.max(tl.abs(x), axis=0))


@triton.jit
def divide_kernel(x_ptr, largest_ptr, out_ptr, n, blocks, BLOCK: tl.constexpr, ALL: tl.constexpr):
    each = tl.arange(0, ALL)
    largest = tl.max(tl.load(largest_ptr + each, mask=each < blocks, other=0.0), axis=0)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, tl.div_rn(x, largest), mask=mask)  # `/` may be off by two units in the last place


def slow_reread(x: torch.Tensor, out: torch.Tensor) -> None:
    n = x.numel()
    blocks = triton.cdiv(n, BLOCK)
    largest = torch.empty(blocks, dtype=torch.float32, device=x.device)
    largest_kernel[(blocks,)](x, largest, n, BLOCK=BLOCK)
    divide_kernel[(blocks,)](x, largest, out, n, blocks, BLOCK=BLOCK, ALL=triton.next_power_of_2(blocks))
