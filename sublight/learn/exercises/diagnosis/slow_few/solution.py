"""A squared ReLU: a program for each block, so that every SM has work and enough reads are on their way."""

import torch
import triton
import triton.language as tl

CAUSE = "few programs"
BLOCK = 1024


@triton.jit
def slow_few_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = place < n
        x = tl.maximum(tl.load(x_ptr + place, mask=mask).to(tl.float32), 0.0)
        tl.store(out_ptr + place, x * x, mask=mask)


def slow_few(x: torch.Tensor, out: torch.Tensor) -> None:
    n = x.numel()
    slow_few_kernel[(triton.cdiv(n, BLOCK),)](x, out, n, BLOCK=BLOCK)
